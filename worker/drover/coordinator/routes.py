"""The routes of the HTTP API, event streams, errors; FastAPI.

Routes translate; what a request means stands in `openai`, how an answer looks in `replies`, what the coordinator says
of itself in `status`. Every error leaves as OpenAI's error object. The routes are there before the model is: until then
those that need it answer 503.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import drover
from drover import metrics
from drover.coordinator import openai, replies
from drover.coordinator.chat import ChatTemplate
from drover.coordinator.generation import Generation, Runner
from drover.coordinator.replies import Json, Reply
from drover.coordinator.status import Status
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import DroverError, RequestError, WorkerError

MAX_BODY = 64 << 20
CLIENT_GONE = 499
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
COUNTED = frozenset({"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
"""Paths that are counted; anything else can be asked for by anybody, so it makes no row in the metrics."""
# status -> type and code of the error object
ERRORS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Model:
    """What the routes answer with."""

    engine: Runner
    tokenizer: Tokenizer
    chat: ChatTemplate
    created: int


class Api:
    """The API as its server sees it: the model, once it is loaded, and the answers under way."""

    def __init__(self, name: str, status: Status) -> None:
        self.name = name
        self.status = status
        self.running: set[Generation] = set()
        self._model: Model | None = None

    def open(self, engine: Runner, tokenizer: Tokenizer, chat: ChatTemplate) -> None:
        """The model is in place: requests are answered from now on."""
        self._model = Model(engine, tokenizer, chat, int(time.time()))
        self.status.lifecycle.ready()

    @property
    def model(self) -> Model:
        """The model; before it is loaded, and when the coordinator is stopping, an error of status 503."""
        why = self.status.lifecycle.why_not_ready()
        if self._model is None or why is not None:
            raise HTTPException(503, why or "the model is not there")
        return self._model

    def why_not_ready(self) -> str | None:
        """Why requests fail now; None if they do not."""
        why = self.status.why_not_ready()
        return why if why is not None or self._model is None else self._model.engine.failure


def create_app(api: Api, api_key: str | None = None) -> FastAPI:
    """The API of one model; with a key, only who sends it may use more than /, /metrics and what probes ask."""
    app = FastAPI(title="Drover", version=drover.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    guards: list[Any] = [Depends(_key_check(api_key))] if api_key else []
    _add_error_handlers(app)
    _add_open_routes(app, api)
    _add_status_routes(app, api, guards)
    _add_routes(app, api, guards)
    app.add_middleware(RequestCount, counts=api.status.requests)
    return app


class RequestCount:
    """Counts answers of the API by path and status."""

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and note the status of an answer when it begins."""

        async def noting(message: Message) -> None:
            path = scope.get("path", "")
            if message["type"] == "http.response.start" and path in COUNTED:
                self._counts[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, noting)


def _add_open_routes(app: FastAPI, api: Api) -> None:
    @app.get("/")
    async def index() -> Json:
        return {
            "name": "drover",
            "version": drover.__version__,
            "model": api.name,
            "endpoints": sorted({route.path for route in app.routes if hasattr(route, "path")}),
        }

    @app.get("/health")
    async def health() -> Response:
        why = api.why_not_ready()
        return JSONResponse({"status": "ok"}) if why is None else _error(503, why)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Alive, and not beyond help: an engine that lost a worker works again only after a restart."""
        failure = api.status.failure()
        return PlainTextResponse("ok\n") if failure is None else PlainTextResponse(f"{failure}\n", 503)

    @app.get("/readyz")
    async def readyz() -> Response:
        why = api.why_not_ready()
        return PlainTextResponse("ok\n") if why is None else PlainTextResponse(f"{why}\n", 503)


def _add_status_routes(app: FastAPI, api: Api, guards: list[Any]) -> None:
    exposition = metrics.exposition(api.status.figures)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(exposition(), headers={"Content-Type": metrics.CONTENT_TYPE})

    @app.get("/state", dependencies=guards)
    async def state() -> Json:
        return api.status.state()


def _add_routes(app: FastAPI, api: Api, guards: list[Any]) -> None:
    @app.get("/v1/models", dependencies=guards)
    async def models() -> Json:
        model = api.model
        meta = {"n_vocab": model.tokenizer.size, "n_ctx": model.engine.context}
        row = {"id": api.name, "object": "model", "created": model.created, "owned_by": "drover", "meta": meta}
        return {"object": "list", "data": [row]}

    @app.post("/v1/completions", dependencies=guards)
    async def completions(request: Request) -> Response:
        return await _generate(request, api, openai.CompletionRequest, replies.Completion, "cmpl-")

    @app.post("/v1/chat/completions", dependencies=guards)
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, api, openai.ChatRequest, replies.ChatCompletion, "chatcmpl-")

    @app.post("/tokenize", dependencies=guards)
    async def tokenize(request: Request) -> Json:
        model = api.model
        asked = openai.parse(openai.TokenizeRequest, await _body(request))
        ids = await run_in_threadpool(model.tokenizer.encode, asked.content, asked.add_special, asked.parse_special)
        return {"tokens": [_with_piece(model.tokenizer, i) for i in ids] if asked.with_pieces else ids}

    @app.post("/detokenize", dependencies=guards)
    async def detokenize(request: Request) -> Json:
        model = api.model
        asked = openai.parse(openai.DetokenizeRequest, await _body(request))
        pieces = b"".join(model.tokenizer.piece(token) for token in asked.tokens)
        return {"content": pieces.decode("utf-8", "replace")}


async def _generate(
    request: Request, api: Api, kind: type[openai.Request], shape: type[Reply], prefix: str
) -> Response:
    """Answer a request of either kind, in one piece or as a stream."""
    model = api.model
    asked = openai.parse(kind, await _body(request))
    jobs = await run_in_threadpool(openai.jobs, asked, model.tokenizer, model.chat, model.engine.context)
    reply = shape(prefix + secrets.token_urlsafe(18), int(time.time()), api.name, model.tokenizer, asked.best_logprobs)
    generation = Generation(model.engine, jobs, asked.choices, model.tokenizer)
    generation.start(asked.stops)
    api.running.add(generation)
    started = time.monotonic()

    def finish() -> None:
        api.running.discard(generation)
        generation.close()
        usage = generation.usage
        seconds = round(time.monotonic() - started, 3)
        log.info("request", path=request.url.path, prompt=usage.prompt, completion=usage.completion, seconds=seconds)

    if asked.stream:
        events = _events(generation.chunks(reply, asked.usage_wanted))
        return EventStream(events, finish)
    try:
        return JSONResponse(await _unless_gone(request, generation.whole(reply)))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    finally:
        finish()


class EventStream(StreamingResponse):
    """A stream of server-sent events that calls `finish` however it ends, even if it never begins."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], finish: Callable[[], None]) -> None:
        super().__init__(events, headers=SSE_HEADERS)
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that goes away ends it."""
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError):
            log.debug("stream ended early")
        finally:
            self._finish()


async def _events(chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
    """Chunks as events; a failure after the first one can only be told in the stream."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
    except DroverError as error:
        yield f"data: {json.dumps(_body_of(_status_of(error), error))}\n\n"


async def _unless_gone(request: Request, work: Awaitable[Json]) -> Json:
    """The result of `work`; ClientDisconnect, and the end of the work, if the client goes away before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise RequestError(f"the body is larger than {MAX_BODY} bytes")
    return bytes(body)


def _with_piece(tokenizer: Tokenizer, token: int) -> Json:
    piece = tokenizer.piece(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


def _key_check(key: str) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise HTTPException(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")

    return check


def _add_error_handlers(app: FastAPI) -> None:
    async def of_ours(_request: Request, error: Exception) -> Response:
        return _error(_status_of(error), error)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
        return _error(error.status_code, text.get(error.status_code, error.detail))

    async def of_client(_request: Request, _gone: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def of_nobody(_request: Request, _bug: Exception) -> Response:
        return _error(500, "an error of the server; its log has more")

    app.add_exception_handler(DroverError, of_ours)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(ClientDisconnect, of_client)
    app.add_exception_handler(Exception, of_nobody)


def _status_of(error: Exception) -> int:
    return 400 if isinstance(error, RequestError) else 503 if isinstance(error, WorkerError) else 500


def _error(status: int, error: Exception | str) -> Response:
    return JSONResponse(_body_of(status, error), status)


def _body_of(status: int, error: Exception | str) -> Json:
    kind, code = ERRORS.get(status) or ERRORS[400 if status < 500 else 500]
    return replies.error(str(error), kind, code, getattr(error, "param", None))

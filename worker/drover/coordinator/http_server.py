"""The HTTP API: routes, event streams, errors; FastAPI on uvicorn.

The only place with `async def` but for `generation`. Routes translate; what a request means stands in `openai`, how an
answer looks in `replies`. Every error leaves as OpenAI's error object.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

import drover
from drover.coordinator import openai, replies
from drover.coordinator.chat import ChatTemplate
from drover.coordinator.generation import Generation, Runner
from drover.coordinator.replies import Json, Reply
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import DroverError, RequestError, WorkerError

MAX_BODY = 64 << 20
SHUTDOWN_SECONDS = 3
CLIENT_GONE = 499
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
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
    name: str
    created: int
    running: set[Generation]


def create_app(
    engine: Runner, tokenizer: Tokenizer, chat: ChatTemplate, model_name: str, api_key: str | None = None
) -> FastAPI:
    """The API of one model; with a key, only who sends it may use more than / and /health."""
    app = FastAPI(title="Drover", version=drover.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    model = Model(engine, tokenizer, chat, model_name, int(time.time()), set())
    app.state.running = model.running
    _add_error_handlers(app)
    _add_open_routes(app, model)
    _add_routes(app, model, [Depends(_key_check(api_key))] if api_key else [])
    return app


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; DroverError if the address cannot be had. Port 0 takes a free one."""
    with listen(host, port) as listener:
        address = listener.getsockname()
        log.info("API is open", url=f"http://{_shown(address[0])}:{address[1]}")
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        with _quiet_signals():
            Server(config, app.state.running).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn, which at its end first lets running answers fail, so that no client is left to wait."""

    def __init__(self, config: uvicorn.Config, running: set[Generation]) -> None:
        super().__init__(config)
        self._generations = running

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what runs, then the server."""
        for generation in self._generations:
            generation.abort("the coordinator is stopping")
        await super().shutdown(sockets)


def _add_open_routes(app: FastAPI, model: Model) -> None:
    @app.get("/")
    async def index() -> Json:
        return {
            "name": "drover",
            "version": drover.__version__,
            "model": model.name,
            "endpoints": sorted({route.path for route in app.routes if hasattr(route, "path")}),
        }

    @app.get("/health")
    async def health() -> Response:
        failure = model.engine.failure
        return JSONResponse({"status": "ok"}) if failure is None else _error(503, failure)


def _add_routes(app: FastAPI, model: Model, guards: list[Any]) -> None:
    @app.get("/v1/models", dependencies=guards)
    async def models() -> Json:
        meta = {"n_vocab": model.tokenizer.size, "n_ctx": model.engine.context}
        row = {"id": model.name, "object": "model", "created": model.created, "owned_by": "drover", "meta": meta}
        return {"object": "list", "data": [row]}

    @app.post("/v1/completions", dependencies=guards)
    async def completions(request: Request) -> Response:
        return await _generate(request, model, openai.CompletionRequest, replies.Completion, "cmpl-")

    @app.post("/v1/chat/completions", dependencies=guards)
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, model, openai.ChatRequest, replies.ChatCompletion, "chatcmpl-")

    @app.post("/tokenize", dependencies=guards)
    async def tokenize(request: Request) -> Json:
        asked = openai.parse(openai.TokenizeRequest, await _body(request))
        ids = await run_in_threadpool(model.tokenizer.encode, asked.content, asked.add_special, asked.parse_special)
        return {"tokens": [_with_piece(model.tokenizer, i) for i in ids] if asked.with_pieces else ids}

    @app.post("/detokenize", dependencies=guards)
    async def detokenize(request: Request) -> Json:
        asked = openai.parse(openai.DetokenizeRequest, await _body(request))
        pieces = b"".join(model.tokenizer.piece(token) for token in asked.tokens)
        return {"content": pieces.decode("utf-8", "replace")}


async def _generate(
    request: Request, model: Model, kind: type[openai.Request], shape: type[Reply], prefix: str
) -> Response:
    """Answer a request of either kind, in one piece or as a stream."""
    asked = openai.parse(kind, await _body(request))
    jobs = await run_in_threadpool(openai.jobs, asked, model.tokenizer, model.chat, model.engine.context)
    reply = shape(
        prefix + secrets.token_urlsafe(18), int(time.time()), model.name, model.tokenizer, asked.best_logprobs
    )
    generation = Generation(model.engine, jobs, asked.choices, model.tokenizer)
    generation.start(asked.stops)
    model.running.add(generation)
    started = time.monotonic()

    def finish() -> None:
        model.running.discard(generation)
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


def listen(host: str, port: int) -> socket.socket:
    """An open port; DroverError says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise DroverError(f"cannot listen on {host!r}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise DroverError(
            f"cannot listen on {_shown(host)}:{port}: {reason}; choose another --port or end what uses it"
        ) from None
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn ends at a signal and then raises it again: here that second one has done its work already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ignore(number: int, frame: FrameType | None) -> None:
        del number, frame

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

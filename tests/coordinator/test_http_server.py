"""The HTTP API over a scripted engine: routes, streams, errors, and clients that go away."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from drover.coordinator import http_server, routes
from drover.coordinator.chat import PLAIN, ChatTemplate
from drover.coordinator.http_server import Server
from drover.coordinator.lifecycle import Lifecycle
from drover.coordinator.routes import Api, create_app
from drover.coordinator.sequence import FinishEvent, Job, Publish, TokenEvent
from drover.coordinator.settings import Config
from drover.coordinator.status import Status
from drover.coordinator.tokenizer import Tokenizer
from drover.errors import DroverError, RequestError, WorkerError

HELLO, WORLD, BOS, END = 259, 264, 265, 268
MESSAGES = [{"role": "user", "content": "hello"}]
WAIT = 20.0


class ScriptedEngine:
    """What the API needs of an engine: a thread a job, which says `script` and then why it ended."""

    def __init__(self, script: list[int], *, endless: bool = False, error: str | None = None) -> None:
        self.context = 64
        self.failure: str | None = None
        self.script = script
        self.endless = endless
        self.error = error
        self.jobs: list[Job] = []
        self.cancelled: list[int] = []
        self.cancels = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job, publish: Publish) -> int:
        if self.failure is not None:
            raise WorkerError(self.failure)
        self.jobs.append(job)
        number = len(self.jobs)
        thread = threading.Thread(target=self._run, args=(number, job, publish))
        self._threads.append(thread)
        thread.start()
        return number

    def cancel(self, sequence_id: int) -> None:
        self.cancelled.append(sequence_id)
        self.cancels.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive()

    def _run(self, number: int, job: Job, publish: Publish) -> None:
        made = 0
        for token in self._tokens(job):
            if number in self.cancelled:
                return publish(FinishEvent("cancelled", len(job.prompt), made))
            if token in job.stop_tokens:
                return publish(FinishEvent("stop", len(job.prompt), made + 1, 0.5, 0.25))
            made += 1
            publish(TokenEvent(token, -0.5 if job.top_logprobs is not None else None, ((token, -0.5),)))
        if self.error is not None:
            return publish(FinishEvent("error", len(job.prompt), made, error=self.error))
        return publish(FinishEvent("length", len(job.prompt), made, 0.5, 0.25))

    def _tokens(self, job: Job) -> Iterator[int]:
        yield from self.script[: job.max_tokens]
        deadline = time.monotonic() + WAIT
        while self.endless and time.monotonic() < deadline:
            yield HELLO
            time.sleep(0.005)


def unloaded() -> Api:
    """The API before its model is there."""
    return Api("tiny", Status(Config(Path("tiny.gguf")), Lifecycle()))


@pytest.fixture
def serve_script(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[ScriptedEngine, FastAPI]]]:
    engines: list[ScriptedEngine] = []

    def build(script: list[int], api_key: str | None = None, **options: Any) -> tuple[ScriptedEngine, FastAPI]:
        engine = ScriptedEngine(script, **options)
        engines.append(engine)
        api = unloaded()
        api.open(engine, tokenizer, ChatTemplate(PLAIN))
        app = create_app(api, api_key)
        app.state.api = api
        return engine, app

    yield build
    for engine in engines:
        engine.join()


@asynccontextmanager
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WAIT) as opened:
        yield opened


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client(app) as opened:
            return await opened.request(method, path, **options)

    return asyncio.run(work())


def post(app: FastAPI, path: str, body: Any, **options: Any) -> httpx.Response:
    return call(app, "POST", path, json=body, **options)


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


Build = Callable[..., tuple[ScriptedEngine, FastAPI]]


def test_a_completion(serve_script: Build) -> None:
    engine, app = serve_script([HELLO, WORLD])
    answer = post(app, "/v1/completions", {"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert body["timings"]["prompt_per_second"] == 4.0
    assert engine.jobs[0].prompt == (BOS, HELLO)


def test_a_chat_that_ends_by_itself(serve_script: Build) -> None:
    _, app = serve_script([HELLO, END])
    body = post(app, "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert [row["token"] for row in choice["logprobs"]["content"]] == ["hello"]
    assert body["usage"]["completion_tokens"] == 2


def test_a_completion_stream(serve_script: Build) -> None:
    _, app = serve_script([HELLO, WORLD])
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, closing, usage, done = events(post(app, "/v1/completions", body))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " world"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert closing["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in [*chunks, closing, usage]}) == 1


def test_a_chat_stream(serve_script: Build) -> None:
    _, app = serve_script([HELLO, WORLD, END])
    *chunks, done = events(post(app, "/v1/chat/completions", {"messages": MESSAGES, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello"}, {"content": " world"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_job(serve_script: Build, stream: bool) -> None:
    engine, app = serve_script([HELLO, WORLD], endless=True)
    answer = post(app, "/v1/completions", {"prompt": "a", "max_tokens": 50, "stop": "or", "stream": stream})
    if stream:
        *chunks, closing, done = events(answer)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello w"
        assert done == "[DONE]"
    else:
        closing = answer.json()
        assert closing["choices"][0]["text"] == "hello w"
        assert closing["usage"]["completion_tokens"] == 2
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert engine.cancelled == [1]


def test_several_prompts_and_choices(serve_script: Build) -> None:
    engine, app = serve_script([HELLO])
    body = {"prompt": ["a", "bb"], "n": 2, "max_tokens": 1, "seed": 3}
    whole = post(app, "/v1/completions", body).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(i, "hello") for i in range(4)]
    assert whole["usage"] == {"prompt_tokens": 2 + 3, "completion_tokens": 4, "total_tokens": 9}
    assert [job.sampling.seed for job in engine.jobs] == [3, 4, 3, 4]
    chunks = events(post(app, "/v1/completions", {**body, "stream": True}))[:-1]
    finished = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "expected"),
    [
        ("/v1/completions", {}, 400, "prompt", "Field required"),
        ("/v1/completions", {"prompt": "x" * 99}, 400, "prompt", "100 tokens; the context holds 64"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo", "echo is not supported"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "messages is empty"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role", "role is missing"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}]}, 400, "tools", "tools is not supported"),
        ("/detokenize", {"tokens": [999]}, 400, None, "token id 999"),
        ("/nothing", {}, 404, None, "there is no /nothing here"),
        ("/health", {}, 405, None, "/health does not take POST"),
    ],
)
def test_errors_have_the_shape_of_openai(
    serve_script: Build, path: str, body: Any, status: int, param: str | None, expected: str
) -> None:
    engine, app = serve_script([HELLO])
    answer = post(app, path, body)
    assert answer.status_code == status
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert expected in error["message"]
    assert error["param"] == param
    assert engine.jobs == []


def test_a_body_that_is_no_json(serve_script: Build) -> None:
    _, app = serve_script([])
    answer = call(app, "POST", "/v1/completions", content=b"{nope")
    assert answer.status_code == 400
    assert "the body is not JSON" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large(serve_script: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    _, app = serve_script([])
    monkeypatch.setattr(routes, "MAX_BODY", 100)
    answer = post(app, "/v1/completions", {"prompt": "x" * 200})
    assert answer.status_code == 400
    assert "larger than 100 bytes" in answer.json()["error"]["message"]


def test_an_engine_that_fails(serve_script: Build) -> None:
    engine, app = serve_script([HELLO], error="worker b:1 went away")
    body = {"prompt": "a", "max_tokens": 5}
    answer = post(app, "/v1/completions", body)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "worker b:1 went away"
    *_, last = events(post(app, "/v1/completions", {**body, "stream": True}))
    assert last["error"]["message"] == "worker b:1 went away"
    assert call(app, "GET", "/health").json() == {"status": "ok"}
    engine.failure = "worker b:1 is gone"
    for stream in (False, True):
        refused = post(app, "/v1/completions", {**body, "stream": stream})
        assert refused.status_code == 503
        assert refused.json()["error"] == {
            "message": "worker b:1 is gone",
            "type": "server_error",
            "param": None,
            "code": "unavailable",
        }
    health = call(app, "GET", "/health")
    assert health.status_code == 503
    assert health.json()["error"]["message"] == "worker b:1 is gone"


def test_a_job_refused_late_ends_those_before_it(serve_script: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, app = serve_script([HELLO], endless=True)
    submit = engine.submit

    def refuse_the_second(job: Job, publish: Publish) -> int:
        if engine.jobs:
            raise RequestError("no more")
        return submit(job, publish)

    monkeypatch.setattr(engine, "submit", refuse_the_second)
    assert post(app, "/v1/completions", {"prompt": "a", "n": 2}).status_code == 400
    assert engine.cancelled == [1]


def test_a_bug_is_told_without_details(serve_script: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, app = serve_script([])
    monkeypatch.setattr(engine, "submit", lambda job, publish: 1 / 0)
    answer = post(app, "/v1/completions", {"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "division" not in answer.text


def test_the_api_key(serve_script: Build) -> None:
    _, app = serve_script([HELLO], api_key="sesam")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesam"}):
        answer = call(app, "GET", "/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert post(app, path, {}).status_code == 401
    assert call(app, "GET", "/v1/models", headers={"Authorization": "Bearer sesam"}).status_code == 200
    assert call(app, "GET", "/health").status_code == 200


def test_models_and_index(serve_script: Build) -> None:
    _, app = serve_script([])
    (model,) = call(app, "GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "drover")
    assert model["meta"] == {"n_vocab": 269, "n_ctx": 64}
    assert "/v1/chat/completions" in call(app, "GET", "/").json()["endpoints"]


def test_tokenize_and_detokenize(serve_script: Build, tokenizer: Tokenizer) -> None:
    _, app = serve_script([])
    assert post(app, "/tokenize", {"content": "hello world"}).json() == {"tokens": [HELLO, WORLD]}
    assert post(app, "/tokenize", {"content": "hello", "add_special": True}).json() == {"tokens": [BOS, HELLO]}
    assert post(app, "/tokenize", {"content": "<s>", "parse_special": False}).json() == {"tokens": [*b"<s>"]}
    pieces = post(app, "/tokenize", {"content": "a©", "with_pieces": True}).json()["tokens"]
    assert [row["piece"] for row in pieces] == ["a", [0xC2], [0xA9]]
    tokens = [BOS, HELLO, *tokenizer.encode("é", False)]
    assert post(app, "/detokenize", {"tokens": tokens}).json() == {"content": "<s>helloé"}
    assert post(app, "/detokenize", {}).json() == {"content": ""}


@contextmanager
def running(app: FastAPI, grace: float = 0) -> Iterator[str]:
    """The app on a real socket; its URL. At the end it is stopped as by a signal."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=3)
        server = Server(config, app.state.api, grace)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.api.status.lifecycle.stopping()
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def test_a_client_that_leaves_a_stream_ends_its_job(serve_script: Build) -> None:
    engine, app = serve_script([HELLO], endless=True)
    body = {"prompt": "a", "max_tokens": 50, "stream": True}
    with running(app) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as answer:
            assert next(answer.iter_lines()).startswith("data: {")
        assert engine.cancels.wait(WAIT)
    assert engine.cancelled == [1]


def test_a_client_that_does_not_wait_ends_its_job(serve_script: Build) -> None:
    engine, app = serve_script([HELLO], endless=True)
    with running(app) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 2}, timeout=httpx.Timeout(WAIT, read=0.3))
        assert engine.cancels.wait(WAIT)
        assert httpx.get(f"{url}/health", timeout=WAIT).status_code == 200
    assert sorted(engine.cancelled) == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_tells_its_clients(serve_script: Build, stream: bool) -> None:
    engine, app = serve_script([HELLO], endless=True)
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        body = {"prompt": "a", "stream": stream}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT))

    with running(app) as url:
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        while not engine.jobs:
            time.sleep(0.01)
    thread.join(WAIT)
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    error = (events(answer)[-1] if stream else answer.json())["error"]
    assert error["message"] == "the coordinator is stopping"
    assert engine.cancelled == [1]


def test_two_clients_at_once(serve_script: Build) -> None:
    _, app = serve_script([HELLO, WORLD])

    async def work() -> list[httpx.Response]:
        async with client(app) as opened:
            asks: list[Coroutine[Any, Any, httpx.Response]] = [
                opened.post("/v1/completions", json={"prompt": str(i), "max_tokens": 2}) for i in range(8)
            ]
            return await asyncio.gather(*asks)

    assert {answer.json()["choices"][0]["text"] for answer in asyncio.run(work())} == {"hello world"}


def test_a_port_in_use() -> None:
    api = unloaded()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(DroverError, match=rf"cannot listen on 127\.0\.0\.1:{port}: address already in use"),
            http_server.opened(create_app(api), api, "127.0.0.1", port, 1),
        ):
            pass


def test_a_host_that_is_none() -> None:
    api = unloaded()
    with (
        pytest.raises(DroverError, match=r"cannot listen on 'no such host'"),
        http_server.opened(create_app(api), api, "no such host", 0, 1),
    ):
        pass


def test_before_the_model_is_loaded() -> None:
    api = unloaded()
    app = create_app(api)
    assert call(app, "GET", "/healthz").text == "ok\n"
    assert call(app, "GET", "/readyz").status_code == 503
    assert "the workers are being reached" in call(app, "GET", "/readyz").text
    api.status.lifecycle.begin_loading({"a:1": 2048, "b:2": 1024})
    api.status.lifecycle.advance("a:1", 1024)
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/health")):
        answer = call(app, method, path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert "1.0 KiB of 3.0 KiB are in place" in answer.json()["error"]["message"]
    state = call(app, "GET", "/state").json()
    assert (state["phase"], state["ready"]) == ("loading", False)
    assert state["loading"] == [
        {"device": "a:1", "bytes": 1024, "total": 2048},
        {"device": "b:2", "bytes": 0, "total": 1024},
    ]
    assert "drover_ready 0.0" in call(app, "GET", "/metrics").text


def test_probes_of_a_model_that_is_loaded(serve_script: Build) -> None:
    engine, app = serve_script([HELLO], api_key="sesam")
    for path in ("/healthz", "/readyz", "/metrics", "/health"):
        assert call(app, "GET", path).status_code == 200
    assert call(app, "GET", "/state").status_code == 401
    state = call(app, "GET", "/state", headers={"Authorization": "Bearer sesam"}).json()
    assert (state["phase"], state["ready"], state["reason"]) == ("ready", True, None)
    post(app, "/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer sesam"})
    post(app, "/v1/completions", {"prompt": "a"})
    text = call(app, "GET", "/metrics").text
    assert 'drover_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'drover_requests_total{path="/v1/completions",status="401"} 1.0' in text
    engine.failure = "worker b:1 is gone"
    assert call(app, "GET", "/readyz").status_code == 503


def test_nothing_new_is_begun_while_running_answers_end(serve_script: Build) -> None:
    engine, app = serve_script([HELLO], endless=True)
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=WAIT))

    with running(app, grace=WAIT) as url:
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        while not engine.jobs:
            time.sleep(0.01)
        app.state.api.status.lifecycle.stopping()
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "b"}, timeout=WAIT)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the coordinator is stopping")
        assert httpx.get(f"{url}/readyz", timeout=WAIT).status_code == 503
        assert httpx.get(f"{url}/healthz", timeout=WAIT).status_code == 200
        threading.Timer(0.5, setattr, (engine, "endless", False)).start()
    thread.join(WAIT)
    assert answers[0].status_code == 200
    assert len(engine.jobs) == 1

"""Requests as they go over the wire, to an API server that only writes them down and answers what it is told."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from drover_operator import cluster
from drover_operator.cluster import ApiServer
from drover_operator.errors import ExistsError, RefusedError, UnavailableError

BODY = {"kind": "InferenceCluster", "metadata": {"name": "herd", "namespace": "farm", "uid": "u"}}
MANIFEST = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {"name": "herd-w", "namespace": "farm"},
    "spec": {},
}


@dataclass
class Recorder:
    """What was asked, and what to answer: status and body by method and path, else an empty object."""

    port: int = 0
    asked: list[tuple[str, str, dict[str, str], str, Any]] = field(default_factory=list)
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def answer(self, method: str, target: str, kind: str, body: bytes) -> tuple[int, Any]:
        split = urlsplit(target)
        self.asked.append((method, split.path, dict(parse_qsl(split.query)), kind, json.loads(body) if body else None))
        return self.answers.get(f"{method} {split.path}", (200, {}))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def act(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            kind = self.headers.get("Content-Type") or ""
            status, body = made.answer(self.command, self.path, kind, self.rfile.read(length))
            text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PATCH = do_POST = do_DELETE = act  # noqa: N815 - the library's names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def api(recorder: Recorder) -> Iterator[ApiServer]:
    settings = client.Configuration(host=f"http://127.0.0.1:{recorder.port}")
    with client.ApiClient(settings) as raw:
        yield ApiServer(DynamicClient(raw, discoverer=lambda *_: None), "drover-operator")
        raw.rest_client.pool_manager.clear()


def refused(status: int, message: str) -> tuple[int, Any]:
    return status, {"kind": "Status", "message": message}


def test_one_object(api: ApiServer, recorder: Recorder) -> None:
    path = "/apis/drover.dev/v1alpha1/namespaces/farm/inferenceclusters/herd"
    recorder.answers[f"GET {path}"] = (200, {"metadata": {"name": "herd"}})
    assert api.get("InferenceCluster", "farm", "herd") == {"metadata": {"name": "herd"}, "kind": "InferenceCluster"}
    assert recorder.asked[0][:2] == ("GET", path)


def test_an_object_that_is_not_there(api: ApiServer, recorder: Recorder) -> None:
    recorder.answers["GET /api/v1/namespaces/farm/configmaps/x"] = refused(404, "not found")
    assert api.get("ConfigMap", "farm", "x") is None


def test_names_cannot_break_out_of_a_path(api: ApiServer, recorder: Recorder) -> None:
    api.get("ConfigMap", "farm", "../../x")
    assert recorder.asked[0][1] == "/api/v1/namespaces/farm/configmaps/..%2F..%2Fx"


def test_all_that_is_owned_is_one_list_a_kind(api: ApiServer, recorder: Recorder) -> None:
    recorder.answers["GET /api/v1/namespaces/farm/pods"] = (200, {"items": [{"metadata": {"name": "p"}}]})
    assert api.owned("farm", "herd") == [{"metadata": {"name": "p"}, "kind": "Pod"}]
    assert sorted(path.rpartition("/")[2] for _, path, *_ in recorder.asked) == sorted(
        cluster.PATHS[kind][1] for kind in cluster.OWNED
    )
    selectors = {query["labelSelector"] for _, _, query, *_ in recorder.asked}
    assert selectors == {"app.kubernetes.io/instance=herd,app.kubernetes.io/managed-by=drover"}


def test_an_apply_is_server_side_with_one_field_manager(api: ApiServer, recorder: Recorder) -> None:
    api.apply(MANIFEST)
    ((method, path, query, kind, body),) = recorder.asked
    assert (method, path) == ("PATCH", "/apis/apps/v1/namespaces/farm/statefulsets/herd-w")
    assert (query, kind) == ({"fieldManager": "drover", "force": "true"}, "application/apply-patch+yaml")
    assert body == MANIFEST


def test_what_is_made_names_a_version_that_nothing_has(api: ApiServer, recorder: Recorder) -> None:
    path = "/apis/apps/v1/namespaces/farm/statefulsets/herd-w"
    recorder.answers[f"PATCH {path}"] = (200, {"metadata": {"name": "herd-w"}})
    assert api.make(MANIFEST) == {"metadata": {"name": "herd-w"}}
    ((method, found, query, kind, body),) = recorder.asked
    assert (method, found, kind) == ("PATCH", path, "application/apply-patch+yaml")
    assert query == {"fieldManager": "drover", "force": "true"}
    assert body["metadata"] == MANIFEST["metadata"] | {"resourceVersion": "1"}
    assert "resourceVersion" not in MANIFEST["metadata"]
    recorder.answers[f"PATCH {path}"] = refused(409, "the object has been modified")
    with pytest.raises(ExistsError, match=r"StatefulSet herd-w: .*the object has been modified"):
        api.make(MANIFEST)
    recorder.answers[f"PATCH {path}"] = refused(422, "spec.x: Invalid")
    with pytest.raises(RefusedError, match=r"StatefulSet herd-w: spec\.x: Invalid"):
        api.make(MANIFEST)


@pytest.mark.parametrize(
    ("status", "message", "error", "words"),
    [
        (422, 'spec.x: Invalid value: "y"', RefusedError, 'StatefulSet herd-w: spec.x: Invalid value: "y"'),
        (403, "exceeded quota", RefusedError, "StatefulSet herd-w: exceeded quota"),
        (404, "namespaces farm not found", RefusedError, "namespaces farm not found"),
        (500, "failed to create typed patch object (a): .b: expected", RefusedError, ".b: expected"),
        (500, "etcd", UnavailableError, "the API server answered 500: etcd"),
        (409, "conflict", UnavailableError, "409: conflict"),
        (429, "too many", UnavailableError, "429"),
        (503, "starting", UnavailableError, "503"),
        (401, "Unauthorized", UnavailableError, "401"),
    ],
)
def test_what_will_not_do_is_told_from_what_may_do_later(
    api: ApiServer, recorder: Recorder, status: int, message: str, error: type[Exception], words: str
) -> None:
    recorder.answers["PATCH /apis/apps/v1/namespaces/farm/statefulsets/herd-w"] = refused(status, message)
    with pytest.raises(error, match=re.escape(words)):
        api.apply(MANIFEST)


def test_an_answer_that_is_no_status(api: ApiServer, recorder: Recorder) -> None:
    recorder.answers["PATCH /apis/apps/v1/namespaces/farm/statefulsets/herd-w"] = (502, "<html>")
    with pytest.raises(UnavailableError, match="the API server answered 502: Bad Gateway"):
        api.apply(MANIFEST)
    recorder.answers["PATCH /apis/apps/v1/namespaces/farm/statefulsets/herd-w"] = (200, "<html>")
    with pytest.raises(UnavailableError, match="cannot be asked"):
        api.apply(MANIFEST)


def test_the_api_server_is_away() -> None:
    settings = client.Configuration(host="http://127.0.0.1:9")
    settings.retries = False
    with client.ApiClient(settings) as raw, pytest.raises(UnavailableError, match="cannot be asked"):
        ApiServer(DynamicClient(raw, discoverer=lambda *_: None), "x").get("Pod", "farm", "p")


def test_a_delete_means_the_very_object(api: ApiServer, recorder: Recorder) -> None:
    path = "/apis/batch/v1/namespaces/farm/jobs/herd-load"
    job = {"kind": "Job", "metadata": {"name": "herd-load", "namespace": "farm", "uid": "j"}}
    api.delete(job)
    assert recorder.asked[0][:2] == ("DELETE", path)
    assert recorder.asked[0][4] == {"propagationPolicy": "Background", "preconditions": {"uid": "j"}}
    recorder.answers[f"DELETE {path}"] = refused(404, "gone")
    api.delete(job)


def test_a_status_is_applied_to_the_very_cluster(api: ApiServer, recorder: Recorder) -> None:
    path = "/apis/drover.dev/v1alpha1/namespaces/farm/inferenceclusters/herd/status"
    recorder.answers[f"PATCH {path}"] = (200, {"metadata": {"resourceVersion": "7"}})
    assert api.write_status(BODY, {"workers": "2/2"}) == {"metadata": {"resourceVersion": "7"}}
    method, found, _, kind, body = recorder.asked[0]
    assert (method, found, kind) == ("PATCH", path, "application/apply-patch+yaml")
    assert body["metadata"] == {"name": "herd", "namespace": "farm", "uid": "u"}
    assert body["status"] == {"workers": "2/2"}
    recorder.answers[f"PATCH {path}"] = refused(404, "gone")
    assert api.write_status(BODY, {}) is None
    recorder.answers[f"PATCH {path}"] = refused(422, "status.x: Invalid")
    with pytest.raises(RefusedError, match=r"the status of herd: status\.x: Invalid"):
        api.write_status(BODY, {})


def test_the_roll_is_read_page_by_page(api: ApiServer, recorder: Recorder) -> None:
    for kind, (prefix, plural) in cluster.PATHS.items():
        items = [{"metadata": {"uid": f"{kind}-1"}}]
        recorder.answers[f"GET /{prefix}/{plural}"] = (200, {"metadata": {}, "items": items})
    pages = iter([({"continue": "more"}, "a"), ({}, "b")])

    def paged(method: str, target: str, kind: str, body: bytes) -> tuple[int, Any]:
        answer = Recorder.answer(recorder, method, target, kind, body)
        if not target.startswith("/api/v1/pods"):
            return answer
        metadata, uid = next(pages)
        return 200, {"metadata": metadata, "items": [{"metadata": {"uid": uid}}]}

    recorder.answer = paged  # type: ignore[method-assign]
    found = [(kind, body["metadata"]["uid"]) for kind, body in api.roll(())]
    whole = [(kind, f"{kind}-1") for kind in ("InferenceCluster", *cluster.OWNED) if kind != "Pod"]
    assert sorted(found) == sorted([*whole, ("Pod", "a"), ("Pod", "b")])
    asked = [query for _, path, query, *_ in recorder.asked if path == "/api/v1/pods"]
    assert asked == [EVERY, EVERY | {"continue": "more"}]
    clusters = [query for _, path, query, *_ in recorder.asked if path.endswith("inferenceclusters")]
    assert clusters == [{"limit": "500"}]


def test_the_roll_of_some_namespaces(api: ApiServer, recorder: Recorder) -> None:
    for prefix, plural in cluster.PATHS.values():
        for space in ("farm", "barn"):
            recorder.answers[f"GET /{prefix}/namespaces/{space}/{plural}"] = (200, {"metadata": {}, "items": []})
    assert list(api.roll(("farm", "barn"))) == []
    assert len(recorder.asked) == 2 * (len(cluster.PATHS) - 1)
    recorder.answers["GET /api/v1/namespaces/barn/pods"] = refused(404, "no such thing")
    with pytest.raises(UnavailableError, match="barn/pods: no such thing"):
        list(api.roll(("barn",)))


EVERY = {"labelSelector": "app.kubernetes.io/managed-by=drover", "limit": "500"}


def test_the_resource_must_be_installed_and_may_be_listed(api: ApiServer, recorder: Recorder) -> None:
    api.check(())
    api.check(("farm", "barn"))
    everywhere, farm, _ = (path for _, path, *_ in recorder.asked)
    assert everywhere == "/apis/drover.dev/v1alpha1/inferenceclusters"
    assert farm == "/apis/drover.dev/v1alpha1/namespaces/farm/inferenceclusters"
    recorder.answers[f"GET {everywhere}"] = refused(404, "the server could not find the requested resource")
    with pytest.raises(UnavailableError, match="install the CustomResourceDefinition first"):
        api.check(())
    recorder.answers[f"GET {farm}"] = refused(403, "op cannot list")
    with pytest.raises(UnavailableError, match="op cannot list; check the operator's role"):
        api.check(("farm",))


def test_events(api: ApiServer, recorder: Recorder) -> None:
    api.tell(BODY, "Warning", "Crashing", "x" * 5000)
    method, path, _, _, body = recorder.asked[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/farm/events")
    assert (body["type"], body["reason"], len(body["message"])) == ("Warning", "Crashing", 1000)
    assert body["involvedObject"]["uid"] == "u"
    assert body["source"] == {"component": "drover-operator"}


@pytest.mark.parametrize("status", [403, 404, 409, 500])
def test_an_event_that_cannot_be_written_is_no_error(api: ApiServer, recorder: Recorder, status: int) -> None:
    recorder.answers["POST /api/v1/namespaces/farm/events"] = refused(status, "no")
    api.tell(BODY, "Normal", "Ready", "fine")


def test_the_verbs_in_the_docstring_cover_every_kind() -> None:
    rows = [row for row in (cluster.__doc__ or "").splitlines() if row.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split("|")[2].split(",")}
    assert {plural for _, plural in cluster.PATHS.values()} <= named

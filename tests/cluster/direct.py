"""The API server without kubectl, for who measures: requests over one connection, watches, and what it counts."""

import json
import re
import ssl
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
SECONDS = 60


class Direct:
    """A connection to the API server that a kubeconfig of ours names; one thread at a time."""

    def __init__(self, kubeconfig: Path) -> None:
        said = json.loads(kubeconfig.read_text())
        where = said["clusters"][0]["cluster"]
        server, trust = urlsplit(where["server"]), ssl.create_default_context(cafile=where["certificate-authority"])
        self._token = said["users"][0]["user"]["token"]
        self._connection = HTTPSConnection(str(server.hostname), server.port, context=trust, timeout=SECONDS)

    def get(self, path: str) -> bytes:
        """What is there."""
        return self._ask("GET", path).read()

    def apply(self, path: str, body: Object) -> None:
        """Server-side apply, as a user of its own."""
        query = urlencode({"fieldManager": "drover-bench", "force": "true"})
        kind = "application/apply-patch+yaml"
        self._ask("PATCH", f"{path}?{query}", json.dumps(body).encode(), {"Content-Type": kind}).read()

    def watch(self, path: str, selector: str) -> Iterator[Object]:
        """Events from now on, of each object its metadata alone; until the connection breaks."""
        query = urlencode({"watch": "true", "labelSelector": selector, "timeoutSeconds": 4 * 3600})
        self._connection.timeout = None
        answer = self._ask("GET", f"{path}?{query}", None, {"Accept": METADATA})
        while line := answer.readline():
            yield json.loads(line)

    def requests(self) -> Counter[tuple[str, str]]:
        """How many requests it has had, by verb and resource."""
        found: Counter[tuple[str, str]] = Counter()
        for labels, count in REQUESTS.findall(self.get("/metrics").decode()):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            found[named["verb"], named["resource"]] += int(float(count))
        return found

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> HTTPResponse:
        self._connection.request(method, path, body, {"Authorization": f"Bearer {self._token}", **(headers or {})})
        answer = self._connection.getresponse()
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise ConnectionError(f"{method} {path}: {answer.status} {answer.read().decode(errors='replace')[:500]}")
        return answer

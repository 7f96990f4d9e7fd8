"""A server of files on loopback: ranges, redirects, failures and cut connections as a test asks for them."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass(slots=True)
class Files:
    """What is served, by path, and how."""

    content: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """More headers of a path's answers."""
    status: dict[str, list[int]] = field(default_factory=dict)
    """Failures with which a path answers first, one each time."""
    redirects: dict[str, str] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after which the body of a path breaks off, one number for each of the first answers."""
    ranges: bool = True
    asked: list[Asked] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def downloads(self, path: str) -> list[str | None]:
        """Ranges of the requests for a path that were no look at its first bytes."""
        return [one.range for one in self.asked if one.path == path and not (one.range or "").startswith("bytes=0-")]


@contextmanager
def serving() -> Iterator[Files]:
    """Serve until the context ends; the caller fills and changes what is served."""
    files = Files()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            path = self.path.partition("?")[0]
            asked = Asked(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
            files.asked.append(asked)
            if files.status.get(path):
                self._end(files.status[path].pop(0), path)
            elif path in files.redirects:
                self._end(302, path, {"Location": files.redirects[path]})
            elif path not in files.content:
                self._end(404, path)
            else:
                self._content(path, files.content[path], asked.range)

        do_HEAD = do_GET  # noqa: N815  the standard library's name

        def _content(self, path: str, data: bytes, asked: str | None) -> None:
            size, match = len(data), re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
            headers = {"ETag": f'"{hash(data)}"'}
            if match and files.ranges:
                start, end = int(match[1]), int(match[2] or size - 1) + 1
                if start >= size:
                    return self._end(416, path)
                data = data[start:end]
                headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
            self._end(206 if "Content-Range" in headers else 200, path, headers, data)
            return None

        def _end(self, status: int, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), **files.headers.get(path, {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "GET":
                looks_only = (self.headers.get("Range") or "").startswith("bytes=0-")
                cut = files.cut.get(path, []) if not looks_only else []
                self.wfile.write(body[: cut.pop(0)] if cut else body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        files.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield files
        finally:
            server.shutdown()
            thread.join()

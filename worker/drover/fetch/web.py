"""The door to the web: ranges of files over HTTP, by the standard library. Every failure is a FetchError.

Credentials go to the host they are for and to no other, redirects never from https to http.
"""

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import IO, Any
from urllib.parse import urlsplit

import drover
from drover.errors import FetchError

SECONDS = 30.0
"""How long a server may be silent."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_AGENT = f"drover/{drover.__version__}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request for a file: bytes come from `start` on; `size` of the whole file and `etag` if told."""

    start: int
    size: int | None
    etag: str | None
    body: IO[bytes]

    def read(self, count: int) -> bytes:
        """At most `count` more bytes; empty at the end."""
        with _translated("the connection"):
            return self.body.read(count)


@contextmanager
def get(
    url: str, *, token: str | None = None, start: int = 0, end: int | None = None, accept: str = "*/*"
) -> Iterator[Answer]:
    """The bytes of a file from `start` to `end` (exclusive), or all of it if the server knows no ranges."""
    headers = {"Accept": accept, "Accept-Encoding": "identity"}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    request = _request(url, headers, token)
    with _translated(url):
        answer = _opener(_FollowingHandler()).open(request, timeout=SECONDS)
    with answer:
        yield _answer(answer)


def head(url: str, token: str | None = None) -> Message:
    """The headers of a file, those of its own host if that sends us elsewhere for the bytes."""
    request = _request(url, {"Accept-Encoding": "identity"}, token, method="HEAD")
    with _translated(url):
        try:
            with _opener(_StayingHandler()).open(request, timeout=SECONDS) as answer:
                headers: Message = answer.headers
                return headers
        except urllib.error.HTTPError as error:
            if not 300 <= error.code < 400:
                raise
            with error:
                return error.headers


def _request(url: str, headers: dict[str, str], token: str | None, method: str = "GET") -> urllib.request.Request:
    if token is not None:
        headers = {**headers, "Authorization": f"Bearer {token}"}
    try:
        return urllib.request.Request(url, headers={**headers, "User-Agent": _AGENT}, method=method)
    except ValueError:
        raise FetchError(f"{url!r} is no address", "InvalidSource") from None


def _opener(redirects: urllib.request.HTTPRedirectHandler) -> urllib.request.OpenerDirector:
    """Only HTTP: the library's usual opener reads local files, too."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        redirects,
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _answer(answer: Any) -> Answer:
    headers = answer.headers
    length = headers.get("Content-Length")
    size = int(length) if length and length.isdigit() else None
    start = 0
    if answer.status == HTTPStatus.PARTIAL_CONTENT:
        unit, _, rest = headers.get("Content-Range", "").partition(" ")
        span, _, total = rest.partition("/")
        first = span.partition("-")[0]
        if unit != "bytes" or not first.isdigit():
            raise FetchError(
                f"a range was answered without saying which: {rest!r}", "SourceUnavailable", transient=True
            )
        start, size = int(first), int(total) if total.isdigit() else None
    return Answer(start, size, headers.get("ETag"), answer)


class _FollowingHandler(urllib.request.HTTPRedirectHandler):
    """Redirects are followed; another host gets no credentials, and none may drop the encryption."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The request to send next."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is None:
            return None
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if before.scheme == "https" and after.scheme != "https":
            raise FetchError(f"{req.full_url} leads to an address without encryption: {newurl}", "InsecureRedirect")
        if (before.scheme, before.netloc) != (after.scheme, after.netloc):
            following.remove_header("Authorization")
        following.method = req.get_method()
        return following


class _StayingHandler(_FollowingHandler):
    """Redirects are followed within a host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The request to send next; None ends here."""
        if urlsplit(req.full_url).netloc != urlsplit(newurl).netloc:
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """What the library raises as a FetchError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            raise _of_status(where, error) from None
    except urllib.error.URLError as error:
        raise _of_failure(where, error.reason) from None
    except (OSError, http.client.HTTPException) as error:
        raise _of_failure(where, error) from None


def _of_status(where: str, error: urllib.error.HTTPError) -> FetchError:
    code, hint = error.code, error.headers.get("X-Error-Message") or error.reason
    if error.headers.get("X-Error-Code") == "RepoNotFound":
        return FetchError(f"{where}: no such repository, or a private one that needs a token ({code})", "NotFound")
    if code in (401, 403):
        return FetchError(f"{where} wants a token that may read it: {hint} ({code})", "Unauthorized")
    if code in (404, 410):
        return FetchError(f"{where}: {hint} ({code}); check the name and the revision", "NotFound")
    if code in _TRANSIENT:
        return FetchError(f"{where} cannot be had now: {hint} ({code})", "SourceUnavailable", transient=True)
    return FetchError(f"{where} was refused: {hint} ({code})", "Refused")


def _of_failure(where: str, failure: object) -> FetchError:
    if isinstance(failure, ssl.SSLCertVerificationError):
        advice = "name the authority in spec.model.caConfigMapRef, or its file in SSL_CERT_FILE"
        why = f"{where}: its certificate is not trusted ({failure.verify_message}); {advice}"
        return FetchError(why, "UntrustedCertificate")
    if isinstance(failure, OSError) and failure.strerror:
        why = failure.strerror
    else:
        why = str(failure) or type(failure).__name__
    return FetchError(f"{where} cannot be reached: {why}", "SourceUnavailable", transient=True)

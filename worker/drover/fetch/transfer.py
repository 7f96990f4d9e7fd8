"""One file from the web into a folder: resumed where it was cut off, hashed as it comes, whole or not there at all."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from drover.errors import ChecksumError, FetchError
from drover.fetch import web
from drover.fetch.preview import Preview
from drover.sizes import format_size

ATTEMPTS = 6
"""Attempts in a row that may end without a byte."""
CHUNK = 1 << 20
PROGRESS_SECONDS = 5.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, handed in: seconds now, and how to wait."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def require_room(found: Sequence[Preview], folder: Path) -> None:
    """FetchError if what is still to come of these files has no room in a folder, as far as their sizes are known.

    Parts of other versions of them are removed first.
    """
    for one in found:
        _sweep(folder, one.remote.name, _path(folder, one))
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _local_failure(error, folder, found[0]) from None
    needed = sum(max(0, one.remote.size - _size(_path(folder, one))) for one in found if one.remote.size is not None)
    if needed > free:
        others = f" and {len(found) - 1} more need" if len(found) > 1 else " needs"
        raise FetchError(
            f"{found[0].remote.name}{others} {format_size(needed)} more and {folder} has {format_size(free)} left, "
            f"{format_size(needed - free)} too little: make room, or ask for a larger volume",
            "DiskFull",
        )


def transfer(found: Preview, folder: Path, sha256: str | None, clock: Clock) -> tuple[str, int]:
    """Download a file into a part of its name; its SHA-256 and size.

    A part left by an earlier attempt is continued if it is of the same file. FetchError, or ChecksumError if what came
    is not what was asked for.
    """
    path = _path(folder, found)
    try:
        with path.open("ab+") as file:
            part = _Part(file)
            _fill(part, found, clock)
            os.fsync(file.fileno())
        _check(path, found, part.digest, sha256)
    except OSError as error:
        raise _local_failure(error, folder, found) from None
    return part.digest, part.size


def publish(found: Sequence[Preview], folder: Path) -> None:
    """Give whole parts their names: all at the end, so that what came of a split model is found by the next attempt."""
    for one in found:
        try:
            os.replace(_path(folder, one), folder / one.remote.name)
        except OSError as error:
            raise _local_failure(error, folder, one) from None


class _Part:
    """A growing file and its hash."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        file.seek(0)
        while piece := file.read(CHUNK):
            self._hash.update(piece)
            self.size += len(piece)

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Forget all of it."""
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0

    def append(self, piece: bytes) -> None:
        """Bytes at its end, on disk."""
        self._file.write(piece)
        self._file.flush()
        self._hash.update(piece)
        self.size += len(piece)


def _identity(found: Preview) -> str:
    """Tells one version of a file from another, as far as the server does."""
    remote = found.remote
    text = remote.sha256 or f"{remote.url.partition('?')[0]} {found.etag} {remote.size}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sweep(folder: Path, name: str, keep: Path) -> None:
    """Remove parts of other versions."""
    for path in folder.glob(f".{name}.*.part"):  # names of models hold nothing that is special in a pattern
        if path != keep:
            with suppress(OSError):
                path.unlink()


def _path(folder: Path, found: Preview) -> Path:
    return folder / f".{found.remote.name}.{_identity(found)}.part"


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _fill(part: _Part, found: Preview, clock: Clock) -> None:
    """Append until the file is whole; what is transient is tried again, the longer the later."""
    size = found.remote.size
    if size is None or part.size > size:
        part.restart()
    watch = _Watch(found.remote.name, size, part, clock)
    failures = 0
    while size is None or part.size < size:
        before = part.size
        try:
            _append(part, found, watch)
            return
        except FetchError as error:
            failures = 1 if part.size > before else failures + 1
            if not error.transient or failures >= ATTEMPTS:
                raise
            log.warning("download interrupted", file=found.remote.name, bytes=part.size, why=str(error))
            clock.sleep(min(30.0, 2.0**failures))


def _append(part: _Part, found: Preview, watch: "_Watch") -> None:
    """Everything from where the part ends; from the beginning if the server knows no other way, or not its size."""
    remote = found.remote
    with web.get(remote.url, token=remote.token, start=part.size if remote.size is not None else 0) as answer:
        if answer.start != part.size:
            part.restart()
        if answer.start != part.size or (remote.size is not None and answer.size not in (None, remote.size)):
            raise FetchError(f"{remote.url} has changed while it was downloaded", "SourceChanged", transient=True)
        while piece := answer.read(CHUNK):
            part.append(piece)
            watch.look()
    if remote.size is not None and part.size != remote.size:
        raise FetchError(f"{remote.url}: the connection ended early", "SourceUnavailable", transient=True)


def _check(path: Path, found: Preview, digest: str, wanted: str | None) -> None:
    for expected, who in ((wanted, "was asked for"), (found.remote.sha256, "its source says")):
        if expected is not None and digest != expected:
            path.unlink()
            raise ChecksumError(
                f"{found.remote.name} has the SHA-256 {digest}, where {who} {expected}: it is discarded"
            )


def _local_failure(error: OSError, folder: Path, found: Preview) -> FetchError:
    if error.errno in _NO_ROOM:
        total = "its size" if found.remote.size is None else format_size(found.remote.size)
        return FetchError(f"{folder} is full: {found.remote.name} needs {total}", "DiskFull")
    return FetchError(f"{folder} cannot be written: {error.strerror or error}", "NotWritable")


class _Watch:
    """Says now and then how far a download is, how fast, and how long it will take."""

    def __init__(self, name: str, size: int | None, part: _Part, clock: Clock) -> None:
        self._name = name
        self._size = size
        self._part = part
        self._clock = clock
        self._told_at = clock.now()
        self._told = part.size

    def look(self) -> None:
        """Say it if it is time to."""
        now, done = self._clock.now(), self._part.size
        if now - self._told_at < PROGRESS_SECONDS:
            return
        rate = max(0.0, (done - self._told) / (now - self._told_at))
        eta = None if self._size is None or not rate else round((self._size - done) / rate)
        speed = f"{format_size(round(rate))}/s"
        log.info("downloading", file=self._name, bytes=done, total=self._size, rate=speed, eta_seconds=eta)
        self._told_at, self._told = now, done

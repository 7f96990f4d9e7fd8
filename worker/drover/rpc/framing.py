"""Bytes as they arrive -> the pieces a frame is made of, pull style: the machine says where the next bytes go.

Small pieces are read ahead into one buffer, so that many requests cost one `recv`; a large body lands directly in the
memory it is meant for and is never copied. Nothing is allocated here on the word of a peer.
"""

READ_AHEAD = 64 << 10


class Inbox:
    """Received bytes that nobody has taken yet."""

    def __init__(self, capacity: int = READ_AHEAD) -> None:
        self._buffer = memoryview(bytearray(capacity))
        self._start = 0
        self._end = 0
        self._target: memoryview | None = None
        self._landed = 0

    def room(self) -> memoryview:
        """Where the next bytes must be written; never empty."""
        if self._target is not None and self._landed < len(self._target):
            return self._target[self._landed :]
        if self._end == len(self._buffer):
            self._compact()
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        """`count` bytes were written at the start of the last `room`."""
        if self._target is not None and self._landed < len(self._target):
            self._landed += count
        else:
            self._end += count

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes (at most the capacity), or None while they are not all here."""
        if self._end - self._start < size:
            return None
        piece = bytes(self._buffer[self._start : self._start + size])
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0
        return piece

    def land(self, target: memoryview) -> None:
        """Send the next `len(target)` bytes into `target`, those already here first."""
        self._target = target
        self._landed = min(len(target), self._end - self._start)
        target[: self._landed] = self._buffer[self._start : self._start + self._landed]
        self._start += self._landed
        if self._start == self._end:
            self._start = self._end = 0

    def landed(self) -> bool:
        """Whether the target of `land` is full; it is forgotten then."""
        if self._target is None or self._landed < len(self._target):
            return False
        self._target = None
        return True

    @property
    def pending(self) -> int:
        """Bytes here that nobody has taken."""
        return self._end - self._start

    def _compact(self) -> None:
        size = self._end - self._start
        self._buffer[:size] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, size

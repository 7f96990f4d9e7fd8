"""A lock that is had in the order in which it was asked for: nobody who comes back overtakes those who wait."""

import threading
from collections import deque
from types import TracebackType


class Turns:
    """Used as `threading.Lock` is; whoever gives it back hands it to the one who has waited longest."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for our turn, at most `timeout` seconds if that is not negative; whether we have it."""
        with self._guard:
            if not self._held:
                self._held = True
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if turn.acquire(timeout=timeout):
            return True
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return False
            return True  # it was handed to us meanwhile

    def release(self) -> None:
        """Hand it on."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

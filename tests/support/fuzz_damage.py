"""What can be wrong with a frame: damage done to a right one, at random but for where it hurts."""

import struct
from collections.abc import Callable, Sequence
from random import Random

from drover.rpc import messages as m
from drover.rpc.versions import Version
from support.fuzz_wire import HEADER, RECORD_FIELDS, Layout, layout

BORDERS = (
    0,
    1,
    2,
    31,
    63,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
)
SIZES = (0, 1, 8, 2**20, 2**31, 2**40, 2**46, 2**46 + 305, 2**63 - 1, 2**63, 2**64 - 1)
ROW_NUMBERS = (-1, -(2**31), 2**31 - 1, 2**30, 9, 257, 2**62, -(2**63), 0x7FC00000, 0x7FF0000000000000)
HOT_FIELDS = (
    (8, 4),
    (12, 8),
    (20, 4),
    (24, 4),
    (28, 4),
    (36, 4),
    (40, 4),
    (52, 4),
    (56, 4),
    (120, 4),
    (124, 8),
    (132, 8),
)
"""Type, buffer, shape, operation, parameter, flags, operands: where a record decides something."""
_ID, _TYPE, _BUFFER, _EXTENTS, _STRIDES, _OP, _PARAMS, _FLAGS, _SOURCES, _VIEW, _DATA = (
    0,
    8,
    12,
    20,
    36,
    52,
    56,
    120,
    124,
    204,
    220,
)
STRANGERS = (
    b"GET / HTTP/1.1\r\nHost: worker\r\nAccept: */*\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"n": 1}\n',
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"SSH-2.0-scanner\r\n",
    b"\0" * 64,
    b"\xff" * 64,
)


class Damage:
    """The damage of one session: what it knows of its buffers decides which addresses are worth a try."""

    def __init__(self, rng: Random, version: Version) -> None:
        self._rng = rng
        self._version = version
        self.handles: Sequence[int] = (1,)
        """Those of the session, freed ones included."""

    def of(self, frame: bytes) -> bytes:
        """The frame, damaged once or a few times."""
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            how = self._rng.choices(_WAYS, _WEIGHTS)[0]
            frame = how(self, frame) if len(frame) >= HEADER.size else self.bits(frame)
        return frame

    def bits(self, frame: bytes) -> bytes:
        """Some bits the other way."""
        raw = bytearray(frame)
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            raw[self._rng.randrange(len(raw))] ^= 1 << self._rng.randrange(8)
        return bytes(raw)

    def number(self, frame: bytes) -> bytes:
        """A number of the head at a border."""
        found = self._layout(frame)
        if found is None or not found.numbers:
            return self.bits(frame)
        at, size = self._rng.choice(found.numbers)
        return self._replaced(frame, HEADER.size + at, size)

    def record(self, frame: bytes) -> bytes:
        """A number of a tensor record at a border."""
        start = self._record(frame)
        if start is None:
            return self.number(frame)
        at, size = self._rng.choice(HOT_FIELDS if self._rng.random() < 0.7 else RECORD_FIELDS)
        return self._replaced(frame, start + at, size)

    def address(self, frame: bytes) -> bytes:
        """A tensor somewhere else: in another buffer, a freed one, somebody else's, in none, over an end."""
        start = self._record(frame)
        if start is None:
            return self.number(frame)
        raw = bytearray(frame)
        handle = self._rng.choice((*self.handles, 0, 5000, 2**24 - 1))
        nearby = self._rng.choice((0, -1, 1, -4, 4, 64, 4096, 65536, 2**40 - 4, self._rng.randrange(1 << 17)))
        if self._rng.random() < 0.7:
            struct.pack_into("<Q", raw, start + _BUFFER, handle)
        if self._rng.random() < 0.7:
            struct.pack_into("<Q", raw, start + _DATA, ((handle << 40) + nearby) % 2**64)
        return bytes(raw)

    def place(self, frame: bytes) -> bytes:
        """A tensor a few bytes further: over an operand beside it, or over the end of its buffer."""
        start = self._record(frame)
        if start is None:
            return self.number(frame)
        raw = bytearray(frame)
        (data,) = struct.unpack_from("<Q", raw, start + _DATA)
        step = self._rng.choice((-64, -16, -4, -2, -1, 1, 2, 4, 16, 64, 256))
        struct.pack_into("<Q", raw, start + _DATA, (data + step) % 2**64)
        return bytes(raw)

    def shape(self, frame: bytes) -> bytes:
        """Other extents or strides, near those that were right."""
        start = self._record(frame)
        if start is None:
            return self.number(frame)
        raw = bytearray(frame)
        at = start + self._rng.choice((_EXTENTS, _STRIDES)) + 4 * self._rng.randrange(4)
        (value,) = struct.unpack_from("<I", raw, at)
        value = self._rng.choice(
            (value + 1, value - 1, value * 2, value // 2, value + 32, value ^ 4, 0, 1, value << 16)
        )
        struct.pack_into("<I", raw, at, value % 2**32)
        return bytes(raw)

    def meaning(self, frame: bytes) -> bytes:
        """Another type, operation or parameter."""
        start = self._record(frame)
        if start is None:
            return self.number(frame)
        raw = bytearray(frame)
        kind = self._rng.randrange(4)
        if kind == 0:
            struct.pack_into("<I", raw, start + _TYPE, self._rng.randrange(48))
        elif kind == 1:
            struct.pack_into("<I", raw, start + _OP, self._rng.randrange(106))
        elif kind == 2:
            at = start + _PARAMS + 4 * self._rng.choice((0, 0, 1, 2, 3, 4, self._rng.randrange(16)))
            struct.pack_into("<i", raw, at, self._rng.choice((-1, 0, 1, 2, 3, 7, 100, 1 << 16, 2**31 - 1, -(2**31))))
        else:
            at = start + _PARAMS + 4 * self._rng.randrange(16)
            number = self._rng.choice((0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"), float("-inf"), 8.0))
            struct.pack_into("<f", raw, at, number)
        return bytes(raw)

    def edges(self, frame: bytes) -> bytes:
        """A graph with cycles, nodes twice or missing, ids twice, operands of others."""
        starts = self._records(frame)
        if frame[0] != _GRAPH or not starts:
            return self.meaning(frame)
        raw, rng = bytearray(frame), self._rng
        one, other = rng.choice(starts), rng.choice(starts)
        some_id = rng.choice((struct.unpack_from("<Q", raw, other)[0], 0, 77, 2**64 - 1))
        kind = rng.randrange(5)
        if kind == 0:
            struct.pack_into("<Q", raw, one + _SOURCES + 8 * rng.choice((0, 0, 1, 2, rng.randrange(10))), some_id)
        elif kind == 1:
            struct.pack_into("<Q", raw, one + _ID, some_id)
        elif kind == 2:
            struct.pack_into("<QQ", raw, one + _VIEW, some_id, rng.choice(BORDERS))
        elif kind == 3:
            struct.pack_into("<i", raw, one + _FLAGS, rng.choice((0, 16, -1)))
        else:
            first = self._first_node(frame)
            if first is not None:
                count = max(1, (starts[0] - 4 - first) // 8)
                struct.pack_into("<Q", raw, first + 8 * rng.randrange(count), some_id)
        return bytes(raw)

    def counts(self, frame: bytes) -> bytes:
        """A graph that lies about its nodes or tensors."""
        starts = self._records(frame)
        first = self._first_node(frame)
        if frame[0] != _GRAPH or not starts or first is None:
            return self.number(frame)
        raw = bytearray(frame)
        at = self._rng.choice((first - 4, starts[0] - 4))
        (value,) = struct.unpack_from("<I", raw, at)
        struct.pack_into("<I", raw, at, self._rng.choice((0, value + 1, value - 1, 2**31, 2**32 - 1, 1 << 18)) % 2**32)
        return bytes(raw)

    def cut(self, frame: bytes) -> bytes:
        """Fewer bytes, and a header that knows."""
        payload = frame[HEADER.size :]
        payload = payload[: self._rng.choice((0, len(payload) // 2, max(0, len(payload) - 1), len(payload) - 8))]
        return HEADER.pack(frame[0], len(payload)) + payload

    def longer(self, frame: bytes) -> bytes:
        """More bytes, and a header that knows."""
        payload = frame[HEADER.size :] + self._rng.randbytes(self._rng.choice((1, 7, 8, 296, 4096)))
        return HEADER.pack(frame[0], len(payload)) + payload

    def size(self, frame: bytes) -> bytes:
        """A header that lies."""
        (_, size) = HEADER.unpack_from(frame)
        lie = self._rng.choice((*SIZES, size + 1, max(0, size - 1), size + 8, max(0, size - 8)))
        return HEADER.pack(frame[0], lie % 2**64) + frame[HEADER.size :]

    def command(self, frame: bytes) -> bytes:
        """The payload of another command."""
        return bytes([self._rng.choice((*range(25), 255))]) + frame[1:]

    def rows(self, frame: bytes) -> bytes:
        """Tensor bytes that are no row numbers of anything."""
        if frame[0] != _SET or len(frame) < HEADER.size + 313:
            return self.record(frame)
        raw = bytearray(frame)
        code, width = self._rng.choice((("<i", 4), ("<q", 8)))
        body = HEADER.size + self._version_head(frame)
        at = body + self._rng.randrange(max(1, (len(raw) - body) // width)) * width
        if at + width <= len(raw):
            fits = [number for number in ROW_NUMBERS if width == 8 or -(2**31) <= number < 2**31]
            struct.pack_into(code, raw, at, self._rng.choice(fits))
        return bytes(raw)

    def noise(self, frame: bytes) -> bytes:  # noqa: ARG002  a row of the table
        """No frame at all."""
        return self._rng.randbytes(self._rng.choice((1, 9, 40, 400)))

    def twice(self, frame: bytes) -> bytes:
        """The same again."""
        return frame + frame

    def _version_head(self, frame: bytes) -> int:
        found = self._layout(frame)
        return 0 if found is None else found.size

    def _layout(self, frame: bytes) -> Layout | None:
        return layout(frame[0], self._version) if len(frame) > HEADER.size else None

    def _records(self, frame: bytes) -> Sequence[int]:
        """Where tensor records start in the frame."""
        found = self._layout(frame)
        if found is None:
            return ()
        if frame[0] == _GRAPH:
            first = self._first_node(frame)
            if first is None:
                return ()
            (n_nodes,) = struct.unpack_from("<I", frame, first - 4)
            table = first + 8 * n_nodes + 4
            return range(table, len(frame) - m.TENSOR_BYTES + 1, m.TENSOR_BYTES)
        return [HEADER.size + at for at in found.records if HEADER.size + at + m.TENSOR_BYTES <= len(frame)]

    def _record(self, frame: bytes) -> int | None:
        starts = self._records(frame)
        return self._rng.choice(starts) if starts else None

    def _first_node(self, frame: bytes) -> int | None:
        """Where the node ids of a graph start, behind their number."""
        found = self._layout(frame)
        if found is None or len(frame) < HEADER.size + found.size + 4:
            return None
        return HEADER.size + found.size + 4

    def _replaced(self, frame: bytes, at: int, size: int) -> bytes:
        raw = bytearray(frame)
        if at + size > len(raw):
            return self.bits(frame)
        old = int.from_bytes(raw[at : at + size], "little")
        new = self._rng.choice((*BORDERS, old + 1, old - 1, old * 2, old + 64, -old)) % (1 << 8 * size)
        raw[at : at + size] = new.to_bytes(size, "little")
        return bytes(raw)


_GRAPH = m.COMMAND_OF[m.GraphCompute].id
_SET = m.COMMAND_OF[m.SetTensor].id
_TABLE: dict[Callable[[Damage, bytes], bytes], int] = {
    Damage.bits: 10,
    Damage.number: 8,
    Damage.record: 12,
    Damage.address: 8,
    Damage.place: 8,
    Damage.shape: 14,
    Damage.meaning: 12,
    Damage.edges: 8,
    Damage.counts: 3,
    Damage.cut: 2,
    Damage.longer: 2,
    Damage.size: 3,
    Damage.command: 3,
    Damage.rows: 6,
    Damage.noise: 1,
    Damage.twice: 2,
}
_WAYS, _WEIGHTS = tuple(_TABLE), tuple(_TABLE.values())

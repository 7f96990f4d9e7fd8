"""A client of an older protocol, written out byte by byte from docs/protocol.md: nothing of our codec is in it."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.link import Link

COMPUTE = 16


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a version does its own way; the defaults are those of 7.0."""

    number: tuple[int, int, int]
    mul_mat: int = 29
    """Its number for MUL_MAT; those below 13 have been the same in all of them."""
    unary: int = 91
    gelu_erf: int = 16
    brief: bool = False
    """HELLO is empty, and answered with three bytes."""
    devices: bool = True
    """Commands name a device, and can ask how many there are."""
    cache_flag: bool = True
    acknowledged: bool = False
    """FREE_BUFFER, BUFFER_CLEAR, INIT_TENSOR and MEMSET_TENSOR are answered with nothing."""
    memset: bool = True
    recompute: bool = True
    marks_nodes: bool = True
    sources: bool = True
    """GET_ALLOC_SIZE carries the operands."""


DIALECTS: Mapping[str, Dialect] = {
    "7.0": Dialect((7, 0, 0)),
    "6.0": Dialect((6, 0, 0), cache_flag=False),
    "5.1": Dialect((5, 1, 0), cache_flag=False, acknowledged=True),
    "5.0": Dialect((5, 0, 0), cache_flag=False, acknowledged=True),
    "4.0": Dialect((4, 0, 3), cache_flag=False, acknowledged=True, memset=False),
    "4.0.2": Dialect((4, 0, 2), unary=88, cache_flag=False, acknowledged=True, memset=False),
    "4.0.1": Dialect((4, 0, 1), unary=87, cache_flag=False, acknowledged=True, memset=False),
    "4.0.0": Dialect((4, 0, 0), unary=86, cache_flag=False, acknowledged=True, memset=False),
    "3.6": Dialect((3, 6, 1), unary=86, brief=True, cache_flag=False, acknowledged=True, memset=False),
    "2.0": Dialect(
        (2, 0, 0),
        mul_mat=28,
        unary=78,
        gelu_erf=14,
        brief=True,
        devices=False,
        cache_flag=False,
        acknowledged=True,
        memset=False,
        recompute=False,
        marks_nodes=False,
        sources=False,
    ),
}


@dataclass(slots=True)
class Record:
    """A tensor of four floats a row."""

    id: int
    buffer: int
    data: int
    rows: int = 1
    op: int = 0
    param: int = 0
    src: Sequence[int] = ()
    flags: int = 0
    columns: int = 4
    name: bytes = b"t"

    def packed(self) -> bytes:
        """The 296 bytes of section 3.1; the last four are what 5.0 and older left there by chance."""
        row = 4 * self.columns
        return (
            struct.pack("<QIQ", self.id, 0, self.buffer)
            + struct.pack("<4I", self.columns, self.rows, 1, 1)
            + struct.pack("<4I", 4, row, row * self.rows, row * self.rows)
            + struct.pack("<Ii60si", self.op, self.param, b"", self.flags)
            + struct.pack("<10Q", *self.src, *[0] * (10 - len(self.src)))
            + struct.pack("<QQQ", 0, 0, self.data)
            + self.name.ljust(64, b"\0")
            + b"\xaa\xbb\xcc\xdd"
        )


class OldClient(Link):
    """A connection that speaks a dialect; replies of another size than its version wants are a failure."""

    def __init__(self, port: int, dialect: Dialect) -> None:
        self.dialect = dialect
        self._device = struct.pack("<I", 0) if dialect.devices else b""
        super().__init__(port)

    def hello(self) -> bytes:
        """The version and all else that the worker answers."""
        return self.ask(14, b"", 3) if self.dialect.brief else self.ask(14, bytes(24), 28)

    def tell(self, command: int, payload: bytes) -> None:
        """Send a request."""
        self.socket.sendall(struct.pack("<BQ", command, len(payload)) + payload)

    def ask(self, command: int, payload: bytes, size: int) -> bytes:
        """Send a request; its reply, which must have `size` bytes."""
        self.tell(command, payload)
        (announced,) = struct.unpack("<Q", self._take(8))
        assert announced == size, f"command {command} was answered with {announced} bytes"
        return self._take(size)

    def settle(self, command: int, payload: bytes) -> None:
        """Send one of the requests that were answered with nothing before 6.0."""
        if self.dialect.acknowledged:
            self.ask(command, payload, 0)
        else:
            self.tell(command, payload)

    def device_memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = struct.unpack("<QQ", self.ask(11, self._device, 16))
        return free, total

    def alignment_and_size(self) -> tuple[int, int]:
        """What GET_ALIGNMENT and GET_MAX_SIZE say."""
        alignment, largest = (struct.unpack("<Q", self.ask(command, self._device, 8))[0] for command in (1, 2))
        return alignment, largest

    def buffer(self, size: int) -> tuple[int, int]:
        """Handle and base of a new buffer."""
        handle, _ = struct.unpack("<QQ", self.ask(0, self._device + struct.pack("<Q", size), 16))
        (base,) = struct.unpack("<Q", self.ask(3, struct.pack("<Q", handle), 8))
        return handle, base

    def alloc_size(self, tensor: Record) -> int:
        """What GET_ALLOC_SIZE says."""
        operands = bytes(2960) if self.dialect.sources else b""
        (size,) = struct.unpack("<Q", self.ask(13, self._device + tensor.packed() + operands, 8))
        return int(size)

    def set(self, tensor: Record, data: bytes) -> None:
        """SET_TENSOR."""
        flag = b"\0" if self.dialect.cache_flag else b""
        self.tell(6, tensor.packed() + flag + struct.pack("<Q", 0) + data)

    def get(self, tensor: Record, size: int) -> bytes:
        """GET_TENSOR."""
        return self.ask(8, tensor.packed() + struct.pack("<QQ", 0, size), size)

    def compute(self, nodes: Sequence[Record], tensors: Sequence[Record]) -> None:
        """GRAPH_COMPUTE, marked as the version marks."""
        for node in nodes:
            node.flags = COMPUTE if self.dialect.marks_nodes else 0
        ids = b"".join(struct.pack("<Q", node.id) for node in nodes)
        table = b"".join(tensor.packed() for tensor in tensors)
        counted = struct.pack("<I", len(nodes)) + ids + struct.pack("<I", len(tensors)) + table
        if self.dialect.number < (3, 5):
            assert self.ask(10, self._device + counted, 1) == b"\0"
        else:
            self.tell(10, self._device + counted)

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            piece = self.socket.recv(size - len(taken))
            if not piece:
                raise EOFError("the worker closed the connection")
            taken += piece
        return taken

"""Every message of ggml RPC 8.0 as a dataclass, and COMMANDS, the table that numbers them.

A class body is the wire layout: fields stand in wire order, and their types say how each is packed (`Wire`). All that
depends on the protocol's version stands here, in `ggml.ops` and in `ggml.types`; what older versions do otherwise, in
`versions`. Layouts: docs/protocol.md section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

from drover.ggml.tensor import Tensor

VERSION = (8, 0, 0)
CAPS_BYTES = 24
TENSOR_BYTES = 296
NO_CAPS = bytes(CAPS_BYTES)
MAX_GRAPH_BYTES = 128 << 20
MAX_DATA_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Wire:
    """How a field is packed: a `struct` code of fixed width."""

    code: str


U8 = Annotated[int, Wire("B")]
U32 = Annotated[int, Wire("I")]
U64 = Annotated[int, Wire("Q")]
Caps = Annotated[bytes, Wire(f"{CAPS_BYTES}s")]
Host = Annotated[bytes, Wire("64s")]
WireTensor = Annotated[Tensor, Wire(f"{TENSOR_BYTES}s")]
Sources = Annotated[tuple[Tensor | None, ...], Wire(f"{10 * TENSOR_BYTES}s")]


@dataclass(frozen=True, slots=True)
class AllocBuffer:
    device: U32
    size: U64


@dataclass(frozen=True, slots=True)
class AllocBufferReply:
    remote_ptr: U64
    remote_size: U64


@dataclass(frozen=True, slots=True)
class GetAlignment:
    device: U32


@dataclass(frozen=True, slots=True)
class GetAlignmentReply:
    alignment: U64


@dataclass(frozen=True, slots=True)
class GetMaxSize:
    device: U32


@dataclass(frozen=True, slots=True)
class GetMaxSizeReply:
    max_size: U64


@dataclass(frozen=True, slots=True)
class BufferGetBase:
    remote_ptr: U64


@dataclass(frozen=True, slots=True)
class BufferGetBaseReply:
    base: U64


@dataclass(frozen=True, slots=True)
class FreeBuffer:
    remote_ptr: U64


@dataclass(frozen=True, slots=True)
class BufferClear:
    remote_ptr: U64
    value: U8


@dataclass(frozen=True, slots=True)
class SetTensor:
    tensor: WireTensor
    cache_flag: U8
    offset: U64
    data: memoryview = field(default=memoryview(b""), repr=False)


@dataclass(frozen=True, slots=True)
class SetTensorHash:
    tensor: WireTensor
    offset: U64
    hash: U64


@dataclass(frozen=True, slots=True)
class SetTensorHashReply:
    result: U8


@dataclass(frozen=True, slots=True)
class GetTensor:
    tensor: WireTensor
    offset: U64
    size: U64

    @property
    def reply_size(self) -> int:
        """Bytes of the answer."""
        return self.size


@dataclass(frozen=True, slots=True)
class CopyTensor:
    src: WireTensor
    dst: WireTensor


@dataclass(frozen=True, slots=True)
class CopyTensorReply:
    result: U8


@dataclass(frozen=True, slots=True)
class GraphCompute:
    """`nodes` are u64 ids in execution order, `tensors` the raw table of 296-byte records (section 3)."""

    device: U32
    uid: U64
    nodes: memoryview = field(repr=False)
    tensors: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class GetDeviceMemory:
    device: U32


@dataclass(frozen=True, slots=True)
class GetDeviceMemoryReply:
    free: U64
    total: U64


@dataclass(frozen=True, slots=True)
class InitTensor:
    tensor: WireTensor


@dataclass(frozen=True, slots=True)
class GetAllocSize:
    device: U32
    tensor: WireTensor
    sources: Sources


@dataclass(frozen=True, slots=True)
class GetAllocSizeReply:
    alloc_size: U64


@dataclass(frozen=True, slots=True)
class Hello:
    caps: Caps = NO_CAPS


@dataclass(frozen=True, slots=True)
class HelloReply:
    major: U8 = VERSION[0]
    minor: U8 = VERSION[1]
    patch: U8 = VERSION[2]
    reserved: U8 = 0
    caps: Caps = NO_CAPS


@dataclass(frozen=True, slots=True)
class ShortHelloReply:
    """The answer of versions before 4.0."""

    major: U8
    minor: U8
    patch: U8


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing, in the place of an answer: versions before 6.0 wait for it where later ones go on."""


@dataclass(frozen=True, slots=True)
class GraphComputeReply:
    """The answer of versions before 3.5."""

    status: U8 = 0


@dataclass(frozen=True, slots=True)
class DeviceCount:
    pass


@dataclass(frozen=True, slots=True)
class DeviceCountReply:
    count: U32


@dataclass(frozen=True, slots=True)
class GraphRecompute:
    device: U32
    uid: U64


@dataclass(frozen=True, slots=True)
class MemsetTensor:
    tensor: WireTensor
    offset: U64
    size: U64
    value: U8


@dataclass(frozen=True, slots=True)
class SetTensor2D:
    tensor: WireTensor
    offset: U64
    size: U64
    n_copies: U64
    stride: U64
    data: memoryview = field(default=memoryview(b""), repr=False)


@dataclass(frozen=True, slots=True)
class GetTensor2D:
    tensor: WireTensor
    offset: U64
    size: U64
    n_copies: U64
    stride: U64

    @property
    def reply_size(self) -> int:
        """Bytes of the answer: the copies, packed."""
        return self.size * self.n_copies


@dataclass(frozen=True, slots=True)
class CommInit:
    device: U32
    rank: U32
    world: U32
    port: U32
    host: Host


@dataclass(frozen=True, slots=True)
class CommInitReply:
    ok: U8


@dataclass(frozen=True, slots=True)
class CommAllreduce:
    device: U32
    tensor: WireTensor


@dataclass(frozen=True, slots=True)
class CommFree:
    device: U32


Request = (
    AllocBuffer
    | GetAlignment
    | GetMaxSize
    | BufferGetBase
    | FreeBuffer
    | BufferClear
    | SetTensor
    | SetTensorHash
    | GetTensor
    | CopyTensor
    | GraphCompute
    | GetDeviceMemory
    | InitTensor
    | GetAllocSize
    | Hello
    | DeviceCount
    | GraphRecompute
    | MemsetTensor
    | SetTensor2D
    | GetTensor2D
    | CommInit
    | CommAllreduce
    | CommFree
)
Reply = (
    AllocBufferReply
    | GetAlignmentReply
    | GetMaxSizeReply
    | BufferGetBaseReply
    | SetTensorHashReply
    | CopyTensorReply
    | GetDeviceMemoryReply
    | GetAllocSizeReply
    | HelloReply
    | ShortHelloReply
    | Done
    | GraphComputeReply
    | DeviceCountReply
    | CommInitReply
)


class Raw(Enum):
    """Marks a reply without a layout."""

    RAW = "raw bytes"


RAW: Final = Raw.RAW


class Body(Enum):
    """What follows the fixed head of a request."""

    NONE = "nothing: the payload has exactly the head's size"
    DATA = "tensor bytes, to land where the receiver says"
    GRAPH = "node ids and a tensor table"


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """A row: `reply` is a class, RAW for bytes whose number the request tells, or None for fire-and-forget."""

    id: int
    name: str
    method: str
    request: type[Request]
    reply: type[Reply] | Raw | None
    body: Body = Body.NONE
    limit: int = 0
    """Largest body in bytes."""
    absent: tuple[tuple[str, Callable[[int], object]], ...] = ()
    """Fields of the request that are not on the wire, and what they are then, given the size of the body."""


_ROWS: tuple[Command, ...] = (
    Command(0, "ALLOC_BUFFER", "alloc_buffer", AllocBuffer, AllocBufferReply),
    Command(1, "GET_ALIGNMENT", "get_alignment", GetAlignment, GetAlignmentReply),
    Command(2, "GET_MAX_SIZE", "get_max_size", GetMaxSize, GetMaxSizeReply),
    Command(3, "BUFFER_GET_BASE", "buffer_get_base", BufferGetBase, BufferGetBaseReply),
    Command(4, "FREE_BUFFER", "free_buffer", FreeBuffer, None),
    Command(5, "BUFFER_CLEAR", "buffer_clear", BufferClear, None),
    Command(6, "SET_TENSOR", "set_tensor", SetTensor, None, Body.DATA, MAX_DATA_BYTES),
    Command(7, "SET_TENSOR_HASH", "set_tensor_hash", SetTensorHash, SetTensorHashReply),
    Command(8, "GET_TENSOR", "get_tensor", GetTensor, RAW),
    Command(9, "COPY_TENSOR", "copy_tensor", CopyTensor, CopyTensorReply),
    Command(10, "GRAPH_COMPUTE", "graph_compute", GraphCompute, None, Body.GRAPH, MAX_GRAPH_BYTES),
    Command(11, "GET_DEVICE_MEMORY", "get_device_memory", GetDeviceMemory, GetDeviceMemoryReply),
    Command(12, "INIT_TENSOR", "init_tensor", InitTensor, None),
    Command(13, "GET_ALLOC_SIZE", "get_alloc_size", GetAllocSize, GetAllocSizeReply),
    Command(14, "HELLO", "hello", Hello, HelloReply),
    Command(15, "DEVICE_COUNT", "device_count", DeviceCount, DeviceCountReply),
    Command(16, "GRAPH_RECOMPUTE", "graph_recompute", GraphRecompute, None),
    Command(17, "MEMSET_TENSOR", "memset_tensor", MemsetTensor, None),
    Command(18, "SET_TENSOR_2D", "set_tensor_2d", SetTensor2D, None, Body.DATA, MAX_DATA_BYTES),
    Command(19, "GET_TENSOR_2D", "get_tensor_2d", GetTensor2D, RAW),
    Command(20, "COMM_INIT", "comm_init", CommInit, CommInitReply),
    Command(21, "COMM_ALLREDUCE", "comm_allreduce", CommAllreduce, None),
    Command(22, "COMM_FREE", "comm_free", CommFree, None),
)

COMMANDS: dict[int, Command] = {row.id: row for row in _ROWS}
COMMAND_OF: dict[type[Request], Command] = {row.request: row for row in _ROWS}

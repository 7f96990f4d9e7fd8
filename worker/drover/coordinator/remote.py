"""RemoteDevice: one worker's device; its methods are the commands of the protocol (docs/protocol.md section 2).

Commands without an answer return at once; whatever goes wrong with the peer, at any time, is a WorkerError that names
the endpoint and says what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drover.coordinator.link import Link, Sent
from drover.errors import DeviceError, WorkerError
from drover.ggml.ops import Op
from drover.ggml.tensor import Tensor
from drover.rpc import messages
from drover.sizes import format_size

CONNECT_SECONDS = 10.0

_STORED_GRAPHS = 1024
_PADDED_ROW = 512
_SIZED_OPS = frozenset({Op.FLASH_ATTN_EXT, Op.MUL_MAT, Op.MUL_MAT_ID, Op.CUMSUM, Op.ARGSORT, Op.TOP_K})


def connect(endpoint: str, timeout: float = CONNECT_SECONDS, name: str | None = None) -> "list[RemoteDevice]":
    """Every device of the worker at `host:port`, all on one connection; seconds to wait for it to answer.

    `name` is what people shall see instead of the address.
    """
    link = Link(endpoint, timeout, name or endpoint)
    first = RemoteDevice(link, 0)
    first.hello()
    count = first.device_count()
    if count == 0:
        link.close()
        raise WorkerError(f"worker {endpoint} has no device; start it with --device cpu")
    link.greeted()
    return [RemoteDevice(link, index) for index in range(count)]


@dataclass(frozen=True, slots=True)
class RemoteBuffer:
    """A block of memory on a worker: its handle, the address arithmetic starts from, and its bytes."""

    handle: int
    base: int
    size: int


class RemoteDevice:
    """One device of one worker. Devices of one worker share its connection; any thread may call."""

    def __init__(self, link: Link, index: int) -> None:
        self._link = link
        self._index = index
        self._sizes: dict[tuple[object, ...], int] = {}
        self._alignment = 0

    @property
    def endpoint(self) -> str:
        """The address it was reached at."""
        return self._link.endpoint

    @property
    def name(self) -> str:
        """What people call it: its worker's address or name, and its number there where it is not the first."""
        return f"{self._link.name}#{self._index}" if self._index else self._link.name

    @property
    def index(self) -> int:
        """Its number on its worker."""
        return self._index

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent to its worker and received from it so far, those of its other devices included."""
        return self._link.sent, self._link.received

    @property
    def lost(self) -> str | None:
        """Why its worker is gone, as far as can be told without asking; None while it is there."""
        return self._link.lost()

    @property
    def alignment(self) -> int:
        """Bytes that addresses of tensors must be a multiple of; asked once."""
        if not self._alignment:
            self._alignment = self.get_alignment()
        return self._alignment

    def allocate(self, size: int, purpose: str) -> RemoteBuffer:
        """Reserve memory; DeviceError, naming the purpose, if the worker has too little."""
        handle, actual = self.alloc_buffer(size)
        if not handle or actual < size:
            free, _ = self.get_device_memory()
            raise DeviceError(
                f"worker {self.name} cannot reserve {format_size(size)} for {purpose} "
                f"({format_size(free)} free); give it fewer layers with --tensor-split, or a smaller --ctx-size"
            )
        return RemoteBuffer(handle, self.buffer_get_base(handle), actual)

    def reserved_bytes(self, tensor: Tensor, sources: Sequence[Tensor] = ()) -> int:
        """Bytes to set aside for a tensor: asked only where the answer may differ (docs/protocol.md section 7.2)."""
        padded = needs_padding(tensor)
        if not padded and tensor.op not in _SIZED_OPS:
            return tensor.nbytes
        key = (tensor.type.id, tensor.op, tensor.params, tensor.ne, tensor.nb)
        if key not in self._sizes:
            self._sizes[key] = max(self.get_alloc_size(tensor, sources), tensor.nbytes)
        return self._sizes[key]

    def compute(self, graph: messages.GraphCompute) -> None:
        """Run a graph: in full the first time, by its uid while the worker is known to keep it."""
        known = self._link.stored_graphs(self._index)
        if graph.uid in known:
            self.graph_recompute(graph.uid)
            return
        if len(known) >= _STORED_GRAPHS:
            known.clear()
        known.add(graph.uid)
        self.graph_compute(graph)

    def close(self) -> None:
        """End the connection, and so everything this client owns on the worker; all its devices are gone."""
        self._link.close()

    # The commands, in the order of their numbers.

    def alloc_buffer(self, size: int) -> tuple[int, int]:
        """Handle and size of new memory; (0, 0) if there is too little."""
        reply = self._link.ask(messages.AllocBuffer(self._index, size), messages.AllocBufferReply)
        return reply.remote_ptr, reply.remote_size

    def get_alignment(self) -> int:
        """Bytes; a power of two."""
        alignment = self._link.ask(messages.GetAlignment(self._index), messages.GetAlignmentReply).alignment
        if alignment < 1 or alignment & (alignment - 1):
            raise WorkerError(f"worker {self.name} has an alignment of {alignment}, which is no power of two")
        return alignment

    def get_max_size(self) -> int:
        """Largest buffer in bytes."""
        return self._link.ask(messages.GetMaxSize(self._index), messages.GetMaxSizeReply).max_size

    def buffer_get_base(self, handle: int) -> int:
        """Where addresses in this buffer begin."""
        return self._link.ask(messages.BufferGetBase(handle), messages.BufferGetBaseReply).base

    def free_buffer(self, handle: int) -> None:
        """Give memory back; stock servers then forget every stored graph, so we do too."""
        self._link.send(messages.FreeBuffer(handle))
        self._link.forget_graphs()

    def buffer_clear(self, handle: int, value: int = 0) -> None:
        """Set every byte of a buffer."""
        self._link.send(messages.BufferClear(handle, value))

    def set_tensor(
        self, tensor: Tensor, data: memoryview, offset: int = 0, cache: bool = False, sent: Sent | None = None
    ) -> None:
        """Write bytes; `cache` asks the worker to keep them; `sent` hears of every piece that went out."""
        self._link.send(messages.SetTensor(tensor, int(cache), offset, data), sent)

    def set_tensor_hash(self, tensor: Tensor, hash_: int, offset: int = 0) -> bool:
        """Whether the worker filled the tensor from its cache."""
        request = messages.SetTensorHash(tensor, offset, hash_)
        return self._link.ask(request, messages.SetTensorHashReply).result == 1

    def get_tensor(self, tensor: Tensor, into: memoryview, offset: int = 0) -> None:
        """Read `len(into)` bytes."""
        self._link.fetch(messages.GetTensor(tensor, offset, len(into)), into)

    def copy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        """Copy between devices of this worker; False if it cannot."""
        return self._link.ask(messages.CopyTensor(src, dst), messages.CopyTensorReply).result == 1

    def graph_compute(self, graph: messages.GraphCompute) -> None:
        """Run a graph and have it stored under its uid; `compute` chooses between this and `graph_recompute`."""
        self._link.send(graph)

    def get_device_memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        reply = self._link.ask(messages.GetDeviceMemory(self._index), messages.GetDeviceMemoryReply)
        return reply.free, reply.total

    def init_tensor(self, tensor: Tensor) -> None:
        """Let the worker prepare the padding of a quantized tensor (docs/protocol.md section 2.3)."""
        self._link.send(messages.InitTensor(tensor))

    def get_alloc_size(self, tensor: Tensor, sources: Sequence[Tensor]) -> int:
        """Bytes the worker wants for this tensor."""
        padded = (*sources, *(None,) * (10 - len(sources)))
        return self._link.ask(messages.GetAllocSize(self._index, tensor, padded), messages.GetAllocSizeReply).alloc_size

    def hello(self) -> messages.HelloReply:
        """Greet: the first command of a connection; another major version is a WorkerError."""
        return self._link.ask(messages.Hello(), messages.HelloReply)

    def device_count(self) -> int:
        """How many devices the worker offers."""
        return self._link.ask(messages.DeviceCount(), messages.DeviceCountReply).count

    def graph_recompute(self, uid: int) -> None:
        """Run a stored graph again."""
        self._link.send(messages.GraphRecompute(self._index, uid))

    def memset_tensor(self, tensor: Tensor, offset: int, size: int, value: int) -> None:
        """Set a range of bytes."""
        self._link.send(messages.MemsetTensor(tensor, offset, size, value))

    def set_tensor_2d(
        self, tensor: Tensor, data: memoryview, size: int, copies: int, stride: int, offset: int = 0
    ) -> None:
        """Write `copies` rows of `size` bytes, `stride` apart."""
        self._link.send(messages.SetTensor2D(tensor, offset, size, copies, stride, data))

    def get_tensor_2d(
        self, tensor: Tensor, into: memoryview, size: int, copies: int, stride: int, offset: int = 0
    ) -> None:
        """Read `copies` rows of `size` bytes, `stride` apart, packed."""
        self._link.fetch(messages.GetTensor2D(tensor, offset, size, copies, stride), into)

    def comm_init(self, rank: int, world: int, host: str, port: int) -> bool:
        """Pair this worker with another one; False if it cannot."""
        request = messages.CommInit(self._index, rank, world, port, host.encode())
        return self._link.ask(request, messages.CommInitReply).ok == 1

    def comm_allreduce(self, tensor: Tensor) -> None:
        """Add the paired worker's elements to this tensor, on both."""
        self._link.send(messages.CommAllreduce(self._index, tensor))

    def comm_free(self) -> None:
        """End the pairing."""
        self._link.send(messages.CommFree(self._index))


def needs_padding(tensor: Tensor) -> bool:
    """Whether a worker may want room behind the rows of this tensor (docs/protocol.md section 7.2)."""
    return tensor.type.quantized and tensor.ne[0] % _PADDED_ROW != 0 and not tensor.view_src

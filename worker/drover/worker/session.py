"""What one client may ask, one method per command: check, act, answer. It owns the client's buffers and graphs.

A method is named as its row of `COMMANDS`, takes that row's request and returns its reply, None for fire-and-forget
commands. RemoteProtocolError and DeviceError mean that this connection, and nothing else, ends (docs/protocol.md
section 1.4). Nothing here is shared between clients but the devices, each behind its lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from drover.errors import DeviceError, RemoteProtocolError
from drover.rpc.messages import (
    COMMAND_OF,
    AllocBuffer,
    AllocBufferReply,
    BufferClear,
    BufferGetBase,
    BufferGetBaseReply,
    CommAllreduce,
    CommFree,
    CommInit,
    CommInitReply,
    CopyTensor,
    CopyTensorReply,
    DeviceCount,
    DeviceCountReply,
    FreeBuffer,
    GetAlignment,
    GetAlignmentReply,
    GetAllocSize,
    GetAllocSizeReply,
    GetDeviceMemory,
    GetDeviceMemoryReply,
    GetMaxSize,
    GetMaxSizeReply,
    GetTensor,
    GetTensor2D,
    GraphCompute,
    GraphRecompute,
    Hello,
    HelloReply,
    InitTensor,
    MemsetTensor,
    Reply,
    Request,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
    SetTensorHashReply,
)
from drover.worker.devices.device import Program
from drover.worker.graph import Programs, resolve
from drover.worker.limits import GENEROUS, Limits
from drover.worker.memory import Memory, Region, SharedDevice, scratch
from drover.worker.profile import Profile
from drover.worker.store import Store
from drover.worker.tally import Tally

_MAX_U64 = (1 << 64) - 1

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Holding:
    """What a client holds of one device at one moment."""

    buffers: int
    bytes: int
    graphs: int


class Session:
    """One client's view of the worker."""

    def __init__(
        self,
        devices: Sequence[SharedDevice],
        store: Store | None = None,
        tally: Tally | None = None,
        limits: Limits = GENEROUS,
        profile: Profile | None = None,
    ) -> None:
        """With a `profile` every node is timed, and noted there."""
        self.memory = Memory(devices, limits.memory)
        self._devices = devices
        self._store = None if store is None else store.use()
        self._tally = tally or Tally()
        self._limits = limits
        self.profile = profile
        self._programs = [Programs(limits.graphs) for _ in devices]
        self._landing: memoryview | None = None

    def answer(self, request: Request) -> Reply | memoryview | None:
        """Do what a complete request asks."""
        reply: Reply | memoryview | None = getattr(self, COMMAND_OF[type(request)].method)(request)
        return reply

    def landing(self, request: Request, size: int) -> memoryview:
        """Where the `size` bytes behind a request's head go: straight into the tensor where the host can reach it."""
        if isinstance(request, GraphCompute):
            self._device(request.device)
            return scratch(size)
        if isinstance(request, SetTensor2D):
            self._rows(request)
            return scratch(size)
        assert isinstance(request, SetTensor)
        self._landing = self.memory.part(request.tensor, request.offset, size).window
        return scratch(size) if self._landing is None else self._landing

    def holdings(self) -> tuple[Holding, ...]:
        """What the client holds, device by device; for other threads."""
        held = self.memory.held()
        return tuple(
            Holding(*held.get(shared, (0, 0)), len(programs))
            for shared, programs in zip(self._devices, self._programs, strict=True)
        )

    def close(self) -> None:
        """Give back everything the client held; safe to call twice."""
        for programs in self._programs:
            programs.clear()
        self._landing = None
        if self._store is not None:
            self._store.close()
        self.memory.close()

    # connection and devices

    def hello(self, _request: Hello) -> HelloReply:
        """TCP only; the connection says which version."""
        return HelloReply()

    def device_count(self, _request: DeviceCount) -> DeviceCountReply:
        """How many devices there are."""
        return DeviceCountReply(len(self._devices))

    def get_device_memory(self, request: GetDeviceMemory) -> GetDeviceMemoryReply:
        """Bytes of a device that are free for this client, and those it has."""
        self._device(request.device)
        return GetDeviceMemoryReply(*self.memory.available(request.device))

    def get_alignment(self, request: GetAlignment) -> GetAlignmentReply:
        """Alignment of tensors, in bytes."""
        return GetAlignmentReply(self._device(request.device).device.alignment)

    def get_max_size(self, request: GetMaxSize) -> GetMaxSizeReply:
        """Largest single buffer, in bytes."""
        return GetMaxSizeReply(self._device(request.device).max_size)

    def get_alloc_size(self, request: GetAllocSize) -> GetAllocSizeReply:
        """Bytes to reserve for a tensor: no more than it has, for our devices pad nothing."""
        self._device(request.device)
        nbytes = request.tensor.nbytes
        if nbytes > _MAX_U64:
            raise RemoteProtocolError(f"tensor {request.tensor.name!r} would have {nbytes} bytes")
        return GetAllocSizeReply(nbytes)

    # buffers

    def alloc_buffer(self, request: AllocBuffer) -> AllocBufferReply:
        """A new buffer; handle and size 0 when there is not enough memory."""
        self._device(request.device)
        try:
            held = self.memory.alloc(request.device, request.size)
        except (DeviceError, MemoryError) as error:
            self._tally.refuse("memory")
            log.warning("buffer refused", size=request.size, why=str(error) or "out of memory")
            return AllocBufferReply(0, 0)
        return AllocBufferReply(held.handle, held.size)

    def buffer_get_base(self, request: BufferGetBase) -> BufferGetBaseReply:
        """Where the client is to believe the buffer starts."""
        return BufferGetBaseReply(self.memory.find(request.remote_ptr).base)

    def free_buffer(self, request: FreeBuffer) -> None:
        """Free a buffer and forget the graphs that use it, no others."""
        self.memory.find(request.remote_ptr)
        for programs in self._programs:
            programs.forget(request.remote_ptr)
        self.memory.free(request.remote_ptr)

    def buffer_clear(self, request: BufferClear) -> None:
        """Set every byte of a buffer."""
        held = self.memory.find(request.remote_ptr)
        self.memory.region(held.handle, held.base, held.size).fill(request.value)

    # tensor data

    def init_tensor(self, request: InitTensor) -> None:
        """Nothing to prepare, for our devices pad nothing."""
        if request.tensor.buffer:
            self.memory.part(request.tensor, 0, 0)

    def set_tensor(self, request: SetTensor) -> None:
        """Bytes into a tensor, and into the weight cache if the client says they are worth it."""
        if request.data is not self._landing:
            self.memory.part(request.tensor, request.offset, len(request.data)).write(request.data)
        self._landing = None
        if request.cache_flag:
            self._tally.sent_after_miss(len(request.data))
            if self._store is not None:
                self._store.put(request.data)

    def set_tensor_hash(self, request: SetTensorHash) -> SetTensorHashReply:
        """Bytes from the weight cache into a tensor; 0 asks the client to send them."""
        self.memory.part(request.tensor, request.offset, 0)
        room = request.tensor.nbytes - request.offset
        size = None if self._store is None else self._store.size(request.hash)
        if self._store is None or size is None or size > room:
            self._tally.missed()
            return SetTensorHashReply(0)
        region = self.memory.part(request.tensor, request.offset, size)
        window = region.window
        data = scratch(size) if window is None else window
        if not self._store.get(request.hash, data):
            self._tally.missed()
            return SetTensorHashReply(0)
        if window is None:
            region.write(data)
        self._tally.hit(size)
        return SetTensorHashReply(1)

    def get_tensor(self, request: GetTensor) -> memoryview:
        """Bytes of a tensor."""
        return self.memory.part(request.tensor, request.offset, request.size).read()

    def memset_tensor(self, request: MemsetTensor) -> None:
        """Set bytes of a tensor."""
        self.memory.part(request.tensor, request.offset, request.size).fill(request.value)

    def copy_tensor(self, request: CopyTensor) -> CopyTensorReply:
        """One tensor's bytes over another's of the same layout."""
        src, dst = request.src, request.dst
        if (src.type, src.ne, src.nb) != (dst.type, dst.ne, dst.nb):
            raise RemoteProtocolError(f"tensors {src.name!r} and {dst.name!r} differ in layout")
        self.memory.part(src, 0, src.nbytes).copy_to(self.memory.part(dst, 0, dst.nbytes))
        return CopyTensorReply(1)

    def set_tensor_2d(self, request: SetTensor2D) -> None:
        """Packed rows into a tensor, `stride` bytes apart."""
        self._rows(request).write_rows(request.data, request.size, request.stride)

    def get_tensor_2d(self, request: GetTensor2D) -> memoryview:
        """Rows of a tensor, packed."""
        return self._rows(request).read_rows(request.n_copies, request.size, request.stride)

    # execution

    def graph_compute(self, request: GraphCompute) -> None:
        """Check, compile and run a graph; keep it under its uid unless that is 0."""
        shared = self._device(request.device)
        graph = resolve(request, self.memory, shared, self._limits)
        with shared.lock, self._tally.computing(len(graph.nodes)):
            program = shared.device.compile(graph.nodes) if graph.nodes else None
            if request.uid:
                self._programs[request.device].keep(request.uid, program, graph)
            if program is not None:
                self._run(shared, program)

    def graph_recompute(self, request: GraphRecompute) -> None:
        """Run a kept graph again on what its memory holds now."""
        shared = self._device(request.device)
        programs = self._programs[request.device]
        program = programs.find(request.uid)
        if program is not None:
            with shared.lock, self._tally.computing(programs.nodes(request.uid)):
                self._run(shared, program)

    # reductions between workers: declined, the client then adds the parts itself

    def comm_init(self, _request: CommInit) -> CommInitReply:
        """No communicator."""
        return CommInitReply(0)

    def comm_allreduce(self, _request: CommAllreduce) -> None:
        """Impossible without a communicator."""
        raise RemoteProtocolError("there is no communicator")

    def comm_free(self, request: CommFree) -> None:
        """Nothing to free."""
        self._device(request.device)

    def _run(self, shared: SharedDevice, program: Program) -> None:
        if self.profile is None:
            shared.device.run(program)
        else:
            self.profile.add(shared.device.run_timed(program))

    def _device(self, index: int) -> SharedDevice:
        if index >= len(self._devices):
            raise RemoteProtocolError(f"device {index} of {len(self._devices)}")
        return self._devices[index]

    def _rows(self, request: SetTensor2D | GetTensor2D) -> Region:
        """The bytes from the first to the last row; rows do not overlap."""
        if request.n_copies == 0 or request.size == 0:
            raise RemoteProtocolError(f"{request.n_copies} rows of {request.size} bytes")
        if request.n_copies > 1 and request.stride < request.size:
            raise RemoteProtocolError(f"rows of {request.size} bytes every {request.stride} bytes overlap")
        reach = (request.n_copies - 1) * request.stride + request.size
        return self.memory.part(request.tensor, request.offset, reach)

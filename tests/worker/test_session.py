"""Every command, good and bad, asked of a session on two devices: one the host can address and one it cannot."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from drover.errors import DeviceError, DroverError, GraphError, RemoteProtocolError
from drover.ggml.ops import Op, pack_params
from drover.ggml.tensor import Tensor
from drover.ggml.types import I32, Q8_0
from drover.hashing import fnv1a
from drover.rpc import messages as m
from drover.worker import holds
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import SharedDevice
from drover.worker.session import Session
from drover.worker.store import Store
from support.client import Bench
from support.devices import Unreachable

SIZE = 1 << 12
LIMIT = 1 << 20
HOST, FAR = 0, 1


@pytest.fixture
def devices() -> list[SharedDevice]:
    return [SharedDevice(ReferenceDevice(LIMIT)), SharedDevice(Unreachable(LIMIT))]


@pytest.fixture
def session(devices: list[SharedDevice]) -> Iterator[Session]:
    made = Session(devices)
    yield made
    made.close()


@pytest.fixture(params=[HOST, FAR])
def bench(request: pytest.FixtureRequest, session: Session) -> Bench:
    return bench_on(session, request.param)


def bench_on(session: Session, device: int, size: int = SIZE) -> Bench:
    handle = session.alloc_buffer(m.AllocBuffer(device, size)).remote_ptr
    return Bench(handle, session.buffer_get_base(m.BufferGetBase(handle)).base, device)


def get(session: Session, tensor: Tensor) -> bytes:
    return bytes(session.get_tensor(m.GetTensor(tensor, 0, tensor.nbytes)))


def put(session: Session, tensor: Tensor, data: bytes, offset: int = 0, cache: int = 0) -> None:
    """As the server does it: the head, the bytes to their place, then the whole request."""
    request = m.SetTensor(tensor, cache, offset)
    place = session.landing(request, len(data))
    place[:] = data
    session.set_tensor(m.SetTensor(tensor, cache, offset, place))


def test_every_command_has_a_method_and_every_public_method_a_command() -> None:
    methods = {name for name in vars(Session) if not name.startswith("_")}
    assert methods - {"answer", "landing", "holdings", "close"} == {command.method for command in m.COMMANDS.values()}


def test_hello_and_devices(session: Session) -> None:
    assert session.answer(m.Hello(b"\1" * 24)) == m.HelloReply(8, 0, 0, 0, bytes(24))
    assert session.answer(m.DeviceCount()) == m.DeviceCountReply(2)
    assert session.answer(m.GetAlignment(0)) == m.GetAlignmentReply(64)
    assert session.answer(m.GetMaxSize(1)) == m.GetMaxSizeReply(1 << 40)
    assert session.answer(m.GetDeviceMemory(1)) == m.GetDeviceMemoryReply(LIMIT, LIMIT)
    session.answer(m.AllocBuffer(1, 1000))
    assert session.answer(m.GetDeviceMemory(1)) == m.GetDeviceMemoryReply(LIMIT - 1000, LIMIT)
    assert session.answer(m.GetDeviceMemory(0)) == m.GetDeviceMemoryReply(LIMIT, LIMIT)


NOWHERE = Tensor(1, (4, 1, 1, 1), (4, 16, 16, 16))


@pytest.mark.parametrize(
    "request_",
    [
        m.GetAlignment(2),
        m.GetMaxSize(2),
        m.GetDeviceMemory(2**32 - 1),
        m.AllocBuffer(2, 64),
        m.GetAllocSize(2, NOWHERE, (None,) * 10),
        m.GraphCompute(2, 0, memoryview(b""), memoryview(b"")),
        m.GraphRecompute(2, 1),
        m.CommFree(2),
    ],
)
def test_unknown_devices(session: Session, request_: m.Request) -> None:
    with pytest.raises(RemoteProtocolError, match=r"device \d+ of 2"):
        session.answer(request_)


def test_alloc_get_alloc_size_and_free(session: Session, devices: list[SharedDevice]) -> None:
    assert session.answer(m.AllocBuffer(0, 100)) == m.AllocBufferReply(1, 100)
    assert session.answer(m.AllocBuffer(0, 0)) == m.AllocBufferReply(2, 0)
    assert session.answer(m.BufferGetBase(2)) == m.BufferGetBaseReply(2 << 40)
    for size in (LIMIT, LIMIT + 1, 2**40 + 1, 2**64 - 1):
        assert session.answer(m.AllocBuffer(0, size)) == m.AllocBufferReply(0, 0)
    assert session.answer(m.FreeBuffer(1)) is None
    assert session.answer(m.AllocBuffer(0, LIMIT)) == m.AllocBufferReply(3, LIMIT)
    for again in (m.FreeBuffer(1), m.BufferGetBase(1), m.BufferClear(1, 0), m.FreeBuffer(0), m.FreeBuffer(2**64 - 1)):
        with pytest.raises(RemoteProtocolError, match="no buffer"):
            session.answer(again)
    session.close()
    assert devices[0].device.memory() == (LIMIT, LIMIT)


def test_alloc_size_is_nbytes(session: Session) -> None:
    quantized = Tensor(1, (320, 3, 1, 1), (34, 340, 1020, 1020), Q8_0)
    assert session.answer(m.GetAllocSize(0, quantized, (None,) * 10)) == m.GetAllocSizeReply(1020)
    assert session.answer(m.GetAllocSize(0, NOWHERE, (NOWHERE, *(None,) * 9))) == m.GetAllocSizeReply(16)
    huge = Tensor(1, (2**32 - 1,) * 4, (2**32 - 1,) * 4)
    with pytest.raises(RemoteProtocolError, match="would have"):
        session.answer(m.GetAllocSize(0, huge, (None,) * 10))


def test_buffer_clear(session: Session, bench: Bench) -> None:
    whole = bench.tensor(SIZE // 4)
    assert get(session, whole) == bytes(SIZE)
    assert session.answer(m.BufferClear(bench.handle, 0xA5)) is None
    assert get(session, whole) == b"\xa5" * SIZE


def test_set_and_get_tensor_in_pieces(session: Session, bench: Bench) -> None:
    first, tensor = bench.tensor(16), bench.tensor(16)
    data = bytes(range(64))
    put(session, tensor, data[:20])
    put(session, tensor, data[20:], offset=20)
    put(session, tensor, b"", offset=64)
    assert get(session, tensor) == data
    assert get(session, first) == bytes(64)
    assert bytes(session.get_tensor(m.GetTensor(tensor, 60, 4))) == data[60:]
    assert bytes(session.get_tensor(m.GetTensor(tensor, 64, 0))) == b""


def test_set_tensor_with_bytes_from_elsewhere(session: Session, bench: Bench) -> None:
    tensor = bench.tensor(4)
    assert session.answer(m.SetTensor(tensor, 0, 4, memoryview(b"abcd"))) is None
    assert get(session, tensor) == b"\0\0\0\0abcd" + bytes(8)


def beyond(tensor: Tensor) -> list[m.Request]:
    """Every transfer command with a range that leaves the tensor, though never the buffer or only by wrapping."""
    data = memoryview(bytes(16))
    requests: list[m.Request] = []
    for offset in (tensor.nbytes - 8, tensor.nbytes, 2**64 - 8, 2**64 - 16):
        requests += [
            m.SetTensor(tensor, 0, offset, data),
            m.GetTensor(tensor, offset, 16),
            m.MemsetTensor(tensor, offset, 16, 1),
            m.SetTensor2D(tensor, offset, 8, 2, 8, data),
            m.GetTensor2D(tensor, offset, 8, 2, 8),
        ]
    requests += [
        m.SetTensorHash(tensor, 2**64 - 8, 1),
        m.SetTensorHash(tensor, tensor.nbytes + 1, 1),
        m.GetTensor(tensor, 0, 2**64 - 1),
        m.MemsetTensor(tensor, 8, 2**64 - 8, 1),
        m.GetTensor2D(tensor, 0, 4, 2, 2**64 - 4),
        m.GetTensor2D(tensor, 0, 4, 2**63, 4),
        m.GetTensor2D(tensor, 0, 2**63, 2, 2**63),
        m.SetTensor2D(tensor, 0, 4, 4, 21, data),
    ]
    return requests


@pytest.mark.parametrize("which", range(len(beyond(Tensor(1, (16, 1, 1, 1), (4, 64, 64, 64))))))
def test_transfers_stay_inside_the_tensor(session: Session, bench: Bench, which: int) -> None:
    tensor = bench.tensor(16)
    with pytest.raises(RemoteProtocolError, match="tensor 't1'"):
        session.answer(beyond(tensor)[which])
    assert get(session, bench.tensor(256)) == bytes(1024)


def everywhere(tensor: Tensor) -> list[m.Request]:
    """Every command that names memory by a tensor."""
    return [
        m.SetTensor(tensor, 0, 0, memoryview(bytes(4))),
        m.SetTensorHash(tensor, 0, 1),
        m.GetTensor(tensor, 0, 4),
        m.CopyTensor(tensor, tensor),
        m.MemsetTensor(tensor, 0, 4, 0),
        m.SetTensor2D(tensor, 0, 4, 1, 4, memoryview(bytes(4))),
        m.GetTensor2D(tensor, 0, 4, 1, 4),
    ]


@pytest.mark.parametrize(
    "place",
    [
        {"buffer": 99},
        {"buffer": 0, "data": 0},
        {"data": (1 << 40) - 1},
        {"data": (1 << 40) + SIZE - 15},
        {"data": 2**64 - 8},
        {"data": 0},
        {"ne": (2**32 - 1,) * 4},
        {"nb": (4, 2**32 - 1, 0, 0), "ne": (4, 2, 1, 1)},
    ],
)
def test_tensors_stay_inside_their_buffer(session: Session, place: dict[str, object]) -> None:
    bench = bench_on(session, HOST)
    tensor = bench.tensor(4)
    for field, value in place.items():
        setattr(tensor, field, value)
    for request in everywhere(tensor):
        with pytest.raises(RemoteProtocolError, match="tensor 't1'"):
            session.answer(request)
    if tensor.buffer:
        with pytest.raises(RemoteProtocolError):
            session.answer(m.InitTensor(tensor))


def test_a_body_is_given_no_place_before_its_head_is_checked(session: Session, bench: Bench) -> None:
    tensor = bench.tensor(4)
    with pytest.raises(RemoteProtocolError):
        session.landing(m.SetTensor(tensor, 0, 0), 1 << 45)
    with pytest.raises(RemoteProtocolError):
        session.landing(m.SetTensor2D(tensor, 0, 1 << 22, 1 << 22, 1 << 22), 1 << 44)
    with pytest.raises(RemoteProtocolError, match="device 7"):
        session.landing(m.GraphCompute(7, 0, memoryview(b""), memoryview(b"")), 1 << 27)


def test_init_tensor_does_nothing(session: Session, bench: Bench) -> None:
    assert session.answer(m.InitTensor(bench.tensor(4))) is None
    assert session.answer(m.InitTensor(NOWHERE)) is None


def test_memset_tensor(session: Session, bench: Bench) -> None:
    tensor = bench.tensor(4)
    assert session.answer(m.MemsetTensor(tensor, 5, 3, 0xFF)) is None
    assert session.answer(m.MemsetTensor(tensor, 16, 0, 0xFF)) is None
    assert get(session, tensor) == bytes(5) + b"\xff\xff\xff" + bytes(8)


def test_2d_transfers(session: Session, bench: Bench) -> None:
    tensor = bench.tensor(10, 3)
    request = m.SetTensor2D(tensor, 4, 8, 3, 40)
    place = session.landing(request, 24)
    place[:] = b"aaaaaaaabbbbbbbbcccccccc"
    assert session.answer(m.SetTensor2D(tensor, 4, 8, 3, 40, place)) is None
    rows = np.frombuffer(get(session, tensor), np.uint8).reshape(3, 40)
    assert [bytes(row[:14]) for row in rows] == [bytes(4) + letter * 8 + bytes(2) for letter in (b"a", b"b", b"c")]
    assert bytes(session.get_tensor_2d(m.GetTensor2D(tensor, 8, 3, 3, 40))) == b"aaabbbccc"
    assert bytes(session.get_tensor_2d(m.GetTensor2D(tensor, 0, 120, 1, 0))) == get(session, tensor)


@pytest.mark.parametrize(("size", "copies", "stride"), [(0, 2, 4), (4, 0, 4), (8, 2, 7), (8, 2, 0)])
def test_2d_transfers_without_rows_or_with_overlapping_ones(
    session: Session, bench: Bench, size: int, copies: int, stride: int
) -> None:
    tensor = bench.tensor(16)
    for request in (
        m.SetTensor2D(tensor, 0, size, copies, stride, memoryview(bytes(size * copies))),
        m.GetTensor2D(tensor, 0, size, copies, stride),
    ):
        with pytest.raises(RemoteProtocolError, match="rows of"):
            session.answer(request)


@pytest.mark.parametrize(("here", "there"), [(HOST, HOST), (HOST, FAR), (FAR, HOST), (FAR, FAR)])
def test_copy_tensor(session: Session, here: int, there: int) -> None:
    source, target = bench_on(session, here).tensor(8, 3), bench_on(session, there).tensor(8, 3)
    data = bytes(range(96))
    put(session, source, data)
    assert session.answer(m.CopyTensor(source, target)) == m.CopyTensorReply(1)
    assert get(session, target) == data


def test_copy_tensor_of_another_layout(session: Session, bench: Bench) -> None:
    source, target = bench.tensor(8, 3), bench.tensor(3, 8)
    with pytest.raises(RemoteProtocolError, match="'t1' and 't2' differ"):
        session.answer(m.CopyTensor(source, target))


def test_the_communicator_is_declined(session: Session, bench: Bench) -> None:
    for device, world in ((0, 2), (9, 2), (0, 3)):
        assert session.answer(m.CommInit(device, 0, world, 60000, bytes(64))) == m.CommInitReply(0)
    assert session.answer(m.CommFree(0)) is None
    with pytest.raises(RemoteProtocolError, match="no communicator"):
        session.answer(m.CommAllreduce(0, bench.tensor(4)))


# weight cache


def test_no_cache(session: Session, bench: Bench) -> None:
    tensor = bench.tensor(16)
    assert session.answer(m.SetTensorHash(tensor, 0, 1)) == m.SetTensorHashReply(0)
    put(session, tensor, bytes(64), cache=1)


@pytest.mark.parametrize("device", [HOST, FAR])
def test_a_weight_comes_from_the_cache_the_second_time(
    tmp_path: Path, devices: list[SharedDevice], device: int
) -> None:
    data = bytes(range(64))
    key = fnv1a(data)
    for again in (False, True):
        session = Session(devices, Store(tmp_path))
        tensor = bench_on(session, device).tensor(16)
        assert session.answer(m.SetTensorHash(tensor, 0, key)) == m.SetTensorHashReply(int(again))
        if not again:
            put(session, tensor, data, cache=1)
        assert get(session, tensor) == data
        session.close()


def test_only_flagged_tensors_are_stored(tmp_path: Path, devices: list[SharedDevice]) -> None:
    session = Session(devices, Store(tmp_path))
    put(session, bench_on(session, HOST).tensor(16), bytes(64), cache=0)
    assert [path.name for path in tmp_path.iterdir()] == [holds.FILE]
    session.close()


def test_a_cached_piece_lands_at_its_offset(tmp_path: Path, devices: list[SharedDevice]) -> None:
    store = Store(tmp_path)
    store.put(memoryview(b"12345678"))
    session = Session(devices, store)
    tensor = bench_on(session, HOST).tensor(16)
    key = fnv1a(b"12345678")
    assert session.answer(m.SetTensorHash(tensor, 56, key)) == m.SetTensorHashReply(1)
    assert get(session, tensor) == bytes(56) + b"12345678"
    assert session.answer(m.SetTensorHash(tensor, 57, key)) == m.SetTensorHashReply(0)  # would leave the tensor
    session.close()


def test_a_damaged_entry_is_asked_for_again(tmp_path: Path, devices: list[SharedDevice]) -> None:
    data = bytes(range(64))
    (tmp_path / f"{fnv1a(data):016x}").write_bytes(data[:-1] + b"!")
    session = Session(devices, Store(tmp_path))
    tensor = bench_on(session, HOST).tensor(16)
    assert session.answer(m.SetTensorHash(tensor, 0, fnv1a(data))) == m.SetTensorHashReply(0)
    put(session, tensor, data, cache=1)
    assert session.answer(m.SetTensorHash(tensor, 0, fnv1a(data))) == m.SetTensorHashReply(1)
    assert get(session, tensor) == data
    session.close()


# graphs


def values(session: Session, tensor: Tensor) -> list[float]:
    found: list[float] = np.frombuffer(get(session, tensor), np.float32).tolist()
    return found


def floats(session: Session, tensor: Tensor, *numbers: float) -> None:
    put(session, tensor, np.array(numbers, np.float32).tobytes())


@pytest.fixture
def host(session: Session) -> Bench:
    return bench_on(session, HOST)


def test_compute_and_recompute(session: Session, host: Bench) -> None:
    a, b = host.tensor(2), host.tensor(2)
    total = host.node(Op.ADD, a, b)
    squared = host.node(Op.SQR, total)
    floats(session, a, 1, 2)
    floats(session, b, 10, 20)
    assert session.answer(host.graph(total, squared, uid=7)) is None
    assert values(session, squared) == [121, 484]
    floats(session, a, 0, 0)
    assert session.answer(m.GraphRecompute(0, 7)) is None
    assert values(session, squared) == [100, 400]


def test_uids_are_per_device_and_zero_is_not_kept(session: Session, host: Bench) -> None:
    node = host.node(Op.SQR, host.tensor(2))
    session.answer(host.graph(node, uid=0))
    session.answer(host.graph(node, uid=7))
    for request in (m.GraphRecompute(0, 0), m.GraphRecompute(0, 8), m.GraphRecompute(1, 7)):
        with pytest.raises(RemoteProtocolError, match="never sent"):
            session.answer(request)


def test_a_graph_with_nothing_to_do_can_be_repeated(session: Session, host: Bench) -> None:
    idle = host.node(Op.SQR, host.tensor(2), flags=0)
    session.answer(host.graph(idle, uid=3))
    session.answer(m.GraphRecompute(0, 3))


def test_graphs_survive_the_end_of_buffers_they_do_not_use(session: Session, host: Bench) -> None:
    other = bench_on(session, HOST)
    mine, theirs = host.node(Op.SQR, host.tensor(2)), other.node(Op.SQR, other.tensor(2))
    session.answer(host.graph(mine, uid=1))
    session.answer(other.graph(theirs, uid=2))
    session.answer(m.FreeBuffer(other.handle))
    session.answer(m.GraphRecompute(0, 1))
    with pytest.raises(RemoteProtocolError, match="graph 2 is gone: buffer 2, which it uses, was freed"):
        session.answer(m.GraphRecompute(0, 2))


def out_of_range(host: Bench) -> m.GraphCompute:
    table, rows = host.tensor(4, 3), host.tensor(2, type_=I32)
    return host.graph(host.node(Op.GET_ROWS, table, rows, extents=(4, 2)))


def unsupported(host: Bench) -> m.GraphCompute:
    return host.graph(host.node(Op.IM2COL_BACK, host.tensor(4)))


@pytest.mark.parametrize(("build", "why"), [(out_of_range, "GET_ROWS"), (unsupported, "'t2' IM2COL_BACK.*unsupported")])
def test_failing_graphs(session: Session, host: Bench, build: Callable[[Bench], m.GraphCompute], why: str) -> None:
    message = build(host)
    session.answer(m.BufferClear(host.handle, 0x70))
    with pytest.raises(DroverError, match=why) as caught:
        session.answer(message)
    assert isinstance(caught.value, RemoteProtocolError | DeviceError | GraphError)


def test_scale_in_place(session: Session, host: Bench) -> None:
    x = host.tensor(2)
    doubled = host.node(Op.SCALE, x, params=pack_params(floats={0: 2.0}), data=x.data)
    floats(session, x, 1, 2)
    session.answer(host.graph(doubled))
    assert values(session, x) == [2, 4]

"""Handles, made-up addresses, and the bounds check at every edge."""

import pytest

from drover.errors import DeviceError, RemoteProtocolError
from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F32, Q8_0, TensorType
from drover.worker.devices.reference.device import ReferenceDevice
from drover.worker.memory import MAX_BUFFER, MAX_BUFFERS, Memory, SharedDevice
from support.devices import Unreachable

LIMIT = 1 << 20


@pytest.fixture(params=[ReferenceDevice, Unreachable])
def device(request: pytest.FixtureRequest) -> SharedDevice:
    return SharedDevice(request.param(LIMIT))


@pytest.fixture
def memory(device: SharedDevice) -> Memory:
    return Memory([device])


def test_handles_count_up_and_addresses_are_made_up(memory: Memory) -> None:
    first, second = memory.alloc(0, 100), memory.alloc(0, 100)
    assert (first.handle, second.handle) == (1, 2)
    assert (first.base, second.base) == (1 << 40, 2 << 40)
    memory.free(1)
    assert memory.alloc(0, 100).handle == 3


def test_new_memory_is_zero(memory: Memory) -> None:
    held = memory.alloc(0, 4096)
    assert bytes(memory.region(held.handle, held.base, 4096).read()) == bytes(4096)


def test_size_zero_is_a_valid_buffer(memory: Memory) -> None:
    held = memory.alloc(0, 0)
    assert held.size == 0
    assert len(memory.region(held.handle, held.base, 0).read()) == 0
    with pytest.raises(RemoteProtocolError):
        memory.region(held.handle, held.base, 1)


@pytest.mark.parametrize("size", [LIMIT + 1, MAX_BUFFER + 1, 2**63, 2**64 - 1])
def test_too_large(memory: Memory, size: int) -> None:
    with pytest.raises(DeviceError, match=str(size)):
        memory.alloc(0, size)
    assert memory.used == 0


def test_a_session_holds_a_bounded_number_of_buffers(memory: Memory) -> None:
    for _ in range(MAX_BUFFERS):
        memory.alloc(0, 0)
    with pytest.raises(DeviceError, match="no more"):
        memory.alloc(0, 0)


def test_accounts_and_gives_everything_back(memory: Memory, device: SharedDevice) -> None:
    memory.alloc(0, 1000)
    memory.alloc(0, 3000)
    assert memory.used == 4000
    assert device.device.memory() == (LIMIT - 4000, LIMIT)
    memory.free(1)
    assert device.device.memory() == (LIMIT - 3000, LIMIT)
    memory.close()
    memory.close()
    assert device.device.memory() == (LIMIT, LIMIT)


@pytest.mark.parametrize("handle", [0, 2, 2**64 - 1])
def test_unknown_handles(memory: Memory, handle: int) -> None:
    memory.alloc(0, 64)
    for use in (memory.find, memory.free, lambda h: memory.region(h, h << 40, 0)):
        with pytest.raises(RemoteProtocolError, match=f"no buffer {handle}"):
            use(handle)


BASE = 1 << 40


@pytest.mark.parametrize(
    ("address", "size", "inside"),
    [
        (BASE, 64, True),
        (BASE + 63, 1, True),
        (BASE + 64, 0, True),
        (BASE, 65, False),
        (BASE + 64, 1, False),
        (BASE - 1, 1, False),
        (BASE - 1, 0, False),
        (0, 1, False),
        (BASE + 8, 2**64 - 8, False),
        (2**64 - 8, 8, False),
        (2**64 - 8, 16, False),
        (2 * BASE, 1, False),
        (BASE, -1, False),
    ],
)
def test_region(memory: Memory, address: int, size: int, inside: bool) -> None:
    memory.alloc(0, 64)
    if inside:
        assert memory.region(1, address, size).offset == address - BASE
    else:
        with pytest.raises(RemoteProtocolError, match="which has 64"):
            memory.region(1, address, size)


def tensor(*extents: int, buffer: int = 1, data: int = BASE, type_: TensorType = F32) -> Tensor:
    ne = shape(*extents)
    return Tensor(1, ne, contiguous_strides(type_, ne), type_, buffer=buffer, data=data, name="t")


@pytest.mark.parametrize(
    ("operand", "offset", "size", "fits"),
    [
        (tensor(16), 0, 64, True),
        (tensor(16), 64, 0, True),
        (tensor(16), 60, 4, True),
        (tensor(16), 0, 65, False),  # inside the buffer, beyond the tensor
        (tensor(16), 2**64 - 8, 16, False),
        (tensor(16), 2**64 - 8, 8, False),
        (tensor(16), 65, 0, False),
        (tensor(33), 0, 4, False),  # the tensor itself leaves its buffer of 128 bytes
        (tensor(32, type_=Q8_0, data=BASE + 94), 0, 34, True),
        (tensor(32, type_=Q8_0, data=BASE + 95), 0, 34, False),
        (tensor(0, data=5), 0, 0, True),  # no elements: anywhere
        (tensor(0), 0, 1, False),
        (tensor(16, buffer=7), 0, 4, False),
        (tensor(0, buffer=7), 0, 0, False),
        (tensor(16, data=0), 0, 4, False),
        (tensor(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1), 0, 4, False),
    ],
)
def test_part_of_a_tensor(memory: Memory, operand: Tensor, offset: int, size: int, fits: bool) -> None:
    memory.alloc(0, 128)
    if fits:
        assert memory.part(operand, offset, size).size == size
    else:
        with pytest.raises(RemoteProtocolError, match="tensor 't': "):
            memory.part(operand, offset, size)


def test_bytes_go_in_and_come_out(memory: Memory) -> None:
    memory.alloc(0, 64)
    memory.region(1, BASE + 8, 4).write(memoryview(b"abcd"))
    memory.region(1, BASE + 20, 3).fill(7)
    whole = bytes(memory.region(1, BASE, 64).read())
    assert whole == bytes(8) + b"abcd" + bytes(8) + b"\7\7\7" + bytes(41)


def test_rows(memory: Memory) -> None:
    memory.alloc(0, 64)
    reach = memory.region(1, BASE + 3, 2 * 10 + 4)
    reach.write_rows(memoryview(b"aaaabbbbcccc"), 4, 10)
    assert bytes(memory.region(1, BASE, 64).read())[:30] == b"\0\0\0aaaa\0\0\0\0\0\0bbbb\0\0\0\0\0\0cccc\0\0\0"
    assert bytes(reach.read_rows(3, 4, 10)) == b"aaaabbbbcccc"
    for stride in (0, 1 << 63, (1 << 64) - 1):
        assert bytes(reach.read_rows(1, 24, stride)) == bytes(reach.read())
    reach.write_rows(memoryview(bytes(24)), 24, (1 << 64) - 1)
    assert bytes(reach.read()) == bytes(24)


@pytest.mark.parametrize("kinds", [(ReferenceDevice, Unreachable), (Unreachable, ReferenceDevice)])
def test_copy_between_devices(kinds: tuple[type[ReferenceDevice], type[ReferenceDevice]]) -> None:
    memory = Memory([SharedDevice(kind(64 << 20)) for kind in kinds])
    size = (33 << 20) + 5
    source, target = memory.alloc(0, size), memory.alloc(1, size)
    memory.region(1, source.base, size).fill(9)
    memory.region(1, source.base + size - 1, 1).fill(1)
    memory.region(1, source.base, size).copy_to(memory.region(2, target.base, size))
    assert bytes(memory.region(2, target.base + size - 2, 2).read()) == b"\x09\x01"
    assert bytes(memory.region(2, target.base, 1).read()) == b"\x09"


def test_copy_within_a_device_may_overlap(memory: Memory) -> None:
    memory.alloc(0, 16)
    memory.region(1, BASE, 16).write(memoryview(bytes(range(16))))
    memory.region(1, BASE, 12).copy_to(memory.region(1, BASE + 4, 12))
    assert bytes(memory.region(1, BASE, 16).read()) == bytes([0, 1, 2, 3, *range(12)])

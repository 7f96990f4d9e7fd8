"""What a client says from its first byte to its last: right frames of every command first, then damaged ones.

A session of a number is the same bytes whenever it is made with the same seed. Handles and addresses are known before
they are answered, for a worker counts them from one, so that a session can be sent at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

import numpy as np

from drover.ggml.tensor import Tensor, contiguous_strides, shape
from drover.ggml.types import F32, I8, Q4_K, TensorType
from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.versions import Version
from support.fuzz_damage import STRANGERS, Damage
from support.fuzz_graphs import Pattern, Room, Table, patterns
from support.fuzz_wire import encode

FRAMES = 16
"""Of every session, so that a frame's number tells its session."""
DEVICES = 2
POOL = 1 << 19
"""Bytes of each kind of content."""
STRANGE, SPOILT_EARLY, RIGHT, HALF, STALLED, RESET, ABSENT = 0.02, 0.04, 0.15, 0.05, 0.001, 0.02, 0.02
"""How many sessions are no client's, damaged from the first frame on, right to the end; how they end; how many nodes
of a graph are not to run."""

Ending = Literal["leaves", "resets", "stalls"]


@dataclass(frozen=True)
class Session:
    """Frames of one connection; `right` ones must be served whole."""

    number: int
    frames: tuple[bytes, ...]
    ending: Ending
    right: bool

    @property
    def first(self) -> int:
        """The number of its first frame."""
        return self.number * FRAMES


class Sessions:
    """All sessions of a seed, for a worker that speaks these versions."""

    def __init__(self, seed: int, version: Version, also: Version | None = None) -> None:
        self._seed = seed
        self._versions = (version, version, also) if also is not None else (version,)
        self.patterns, self._pools = material(seed)

    def session(self, number: int) -> Session:
        """The session of this number."""
        rng = Random(f"{self._seed} {number}")
        version = rng.choice(self._versions)
        frames, right, handles = self._frames(rng, version)
        dice = rng.random()
        if dice < STRANGE:
            frames[0] = rng.choice(STRANGERS)
            return Session(number, tuple(frames), "leaves", right=False)
        if dice < STRANGE + RIGHT:
            return Session(number, tuple(frames), "leaves", right)
        damage = Damage(rng, version)
        damage.handles = handles
        late = max(rng.randrange(4, FRAMES), rng.randrange(4, FRAMES))  # most damage ends a session
        start = rng.randrange(3) if rng.random() < SPOILT_EARLY else late
        for index in range(start, FRAMES):
            if index == start or rng.random() < 0.7:
                frames[index] = damage.of(frames[index])
        return self._ended(number, frames, rng)

    @staticmethod
    def _ended(number: int, frames: list[bytes], rng: Random) -> Session:
        dice = rng.random()
        if dice < HALF + STALLED:
            frames[-1] = frames[-1][: rng.randrange(1, len(frames[-1]) + 1)]
        ending: Ending = "stalls" if dice < STALLED else "resets" if dice > 1 - RESET else "leaves"
        return Session(number, tuple(frames), ending, right=False)

    def _frames(self, rng: Random, version: Version) -> tuple[list[bytes], bool, list[int]]:
        script = _Script(rng, version, self.patterns, self._pools)
        while len(script.frames) < FRAMES:
            script.go_on()
        return script.frames[:FRAMES], script.right, list(range(1, script.handed_out + 1))


@cache
def material(seed: int) -> tuple[Sequence[Pattern], Sequence[memoryview]]:
    """What the graphs and the contents of a seed are made of."""
    rng = Random(f"{seed} patterns")
    return patterns(rng), _pools(rng)


class _Script:
    """Right frames of one session, and what the worker will hold by then."""

    def __init__(self, rng: Random, version: Version, known: Sequence[Pattern], pools: Sequence[memoryview]) -> None:
        self._rng = rng
        self._version = version
        self._known = known
        self._pools = pools
        self._device = rng.randrange(DEVICES) if version.greets_briefly is False else 0
        self._rooms: list[Room] = []
        self._uids: list[int] = []
        self.handed_out = 0
        self.frames: list[bytes] = []
        self.right = True
        """Whether all of it must be served: where row numbers are operands, something else may come over them."""
        self._say(m.Hello())
        self._open()

    def go_on(self) -> None:
        """Another frame or a few."""
        _ACTS[self._rng.choices(range(len(_ACTS)), _ACT_WEIGHTS)[0]](self)

    def _open(self) -> None:
        """Buffers for some nodes, what they start with, and the graph."""
        rng = self._rng
        chosen = rng.sample(self._known, rng.choice((1, 1, 2, 3)))
        size = sum(pattern.size for pattern in chosen)
        for _ in range(rng.choice((1, 1, 2))):
            self._alloc(size + rng.randrange(100))
        self._graph(chosen)

    def graph(self) -> None:
        """Other nodes in the buffers that are there."""
        self._graph(self._rng.sample(self._known, self._rng.choice((1, 2))))

    def _graph(self, chosen: Sequence[Pattern]) -> None:
        if not self._rooms:
            return
        rng, table = self._rng, Table()
        for room in self._rooms:
            room.cursor = room.size - (rng.randrange(64) if rng.random() < 0.3 else 0)
        for pattern in chosen:
            if not table.add(pattern, self._rooms, rng):
                break
        for node in table.nodes:
            if rng.random() < ABSENT:
                node.flags = 0
        for tensor, content in table.contents:
            self._say(m.SetTensor(_bytes(tensor, len(content)), 0, 0, memoryview(content)))
        self.right &= not table.contents
        uid = rng.randrange(4)
        ids = [node.id for node in table.nodes]
        if self._say(codec.encode_graph(self._device, uid, ids, table.tensors)):
            self._uids.append(uid)
        if table.nodes and rng.random() < 0.5:
            node = rng.choice(table.nodes)
            self._say(m.GetTensor(node, 0, node.nbytes))

    def alloc(self) -> None:
        """One more buffer."""
        self._alloc(self._rng.choice((0, 1, 63, 4096, self._rng.randrange(1 << 14))))

    def _alloc(self, size: int) -> None:
        if not self._say(m.AllocBuffer(self._device, size)):
            return
        self.handed_out += 1
        self._rooms.append(Room(self.handed_out, size))
        if self._rng.random() < 0.6:
            self.fill()

    def fill(self) -> None:
        """A buffer full of something."""
        if self._rooms:
            room = self._rng.choice(self._rooms)
            pool = self._rng.choice(self._pools)
            start = self._rng.randrange(0, POOL - room.size, 4)
            tensor = Tensor(1, shape(room.size), (1, *(room.size,) * 3), I8, buffer=room.handle, data=room.base)
            self._say(m.SetTensor(tensor, int(self._rng.random() < 0.01), 0, pool[start : start + room.size]))

    def free(self) -> None:
        """One buffer less."""
        if len(self._rooms) > 1:
            self._say(m.FreeBuffer(self._rooms.pop(self._rng.randrange(len(self._rooms))).handle))
            self._uids.clear()

    def clear(self) -> None:
        """A buffer of one value."""
        if self._rooms:
            self._say(m.BufferClear(self._rng.choice(self._rooms).handle, self._rng.randrange(256)))

    def base(self) -> None:
        """Where a buffer starts."""
        if self._rooms:
            self._say(m.BufferGetBase(self._rng.choice(self._rooms).handle))

    def again(self) -> None:
        """A graph that was sent."""
        uids = [uid for uid in self._uids if uid]
        if uids:
            self._say(m.GraphRecompute(self._device, self._rng.choice(uids)))

    def query(self) -> None:
        """Something of the device."""
        device = self._device
        requests = (m.DeviceCount(), m.GetAlignment(device), m.GetMaxSize(device), m.GetDeviceMemory(device))
        self._say(self._rng.choice(requests))

    def alloc_size(self) -> None:
        """What a tensor would take."""
        self._say(m.GetAllocSize(self._device, self._tensor(), (self._tensor(), *(None,) * 9)))

    def init(self) -> None:
        """A tensor made ready."""
        self._say(m.InitTensor(self._tensor()))

    def get(self) -> None:
        """Bytes of a tensor."""
        tensor, offset, size = self._part()
        self._say(m.GetTensor(tensor, offset, size))

    def set(self) -> None:
        """Bytes into a tensor."""
        tensor, offset, size = self._part()
        self._say(m.SetTensor(tensor, 0, offset, self._rng.choice(self._pools)[:size]))

    def hash(self) -> None:
        """Bytes that the worker may have."""
        tensor, offset, _ = self._part()
        self._say(m.SetTensorHash(tensor, offset, self._rng.getrandbits(64)))

    def memset(self) -> None:
        """One value into a tensor."""
        tensor, offset, size = self._part()
        self._say(m.MemsetTensor(tensor, offset, size, self._rng.randrange(256)))

    def copy(self) -> None:
        """A tensor over another, or over itself."""
        tensor, other = self._tensor(), self._tensor()
        target = Tensor(2, tensor.ne, tensor.nb, tensor.type, buffer=other.buffer, data=other.data)
        room = next((room for room in self._rooms if room.handle == other.buffer), None)
        if room is not None and target.data - room.base + target.nbytes <= room.size:
            self._say(m.CopyTensor(tensor, target))

    def rows(self) -> None:
        """Rows into a tensor, or out of it."""
        tensor, offset, size = self._part()
        count = self._rng.choice((1, 2, 3))
        stride, width = size // count, size // count // 2
        if width == 0:
            return
        if self._rng.random() < 0.5:
            self._say(m.GetTensor2D(tensor, offset, width, count, stride))
        else:
            self._say(m.SetTensor2D(tensor, offset, width, count, stride, self._pools[0][: width * count]))

    def comm(self) -> None:
        """What the worker declines."""
        self._say(m.CommInit(self._device, 0, 2, 51051, bytes(64)))

    def comm_free(self) -> None:
        """Nothing to free."""
        self._say(m.CommFree(self._device))

    def _tensor(self) -> Tensor:
        """Some tensor within some buffer."""
        if not self._rooms:
            return Tensor(1, (0, 1, 1, 1), (4, 0, 0, 0))
        rng = self._rng
        room = rng.choice(self._rooms)
        kind: TensorType = rng.choice((F32, I8, I8, Q4_K))
        whole = room.size // kind.type_size
        if not whole:
            return Tensor(1, (0, 1, 1, 1), (4, 0, 0, 0), buffer=room.handle, data=room.base)
        units = rng.randrange(1, whole + 1)
        start = rng.randrange(room.size - units * kind.type_size + 1)
        ne = shape(units * kind.block_size)
        return Tensor(1, ne, contiguous_strides(kind, ne), kind, buffer=room.handle, data=room.base + start)

    def _part(self) -> tuple[Tensor, int, int]:
        """A tensor, and the offset and size of some of it."""
        tensor = self._tensor()
        offset = self._rng.randrange(tensor.nbytes + 1) if self._rng.random() < 0.5 else 0
        return tensor, offset, self._rng.randrange(tensor.nbytes - offset + 1)

    def _say(self, request: m.Request) -> bool:
        frame = encode(request, self._version)
        if frame is None:
            return False
        self.frames.append(frame)
        return True


_TABLE: dict[Callable[[_Script], None], int] = {
    _Script.graph: 10,
    _Script.again: 8,
    _Script.fill: 4,
    _Script.alloc: 3,
    _Script.free: 3,
    _Script.clear: 2,
    _Script.base: 3,
    _Script.query: 4,
    _Script.alloc_size: 3,
    _Script.init: 3,
    _Script.get: 5,
    _Script.set: 5,
    _Script.hash: 2,
    _Script.memset: 4,
    _Script.copy: 5,
    _Script.rows: 6,
    _Script.comm: 1,
    _Script.comm_free: 1,
}
_ACTS, _ACT_WEIGHTS = tuple(_TABLE), tuple(_TABLE.values())


def _bytes(tensor: Tensor, size: int) -> Tensor:
    """The memory of a tensor as bytes."""
    return Tensor(tensor.id, shape(size), (1, *(size,) * 3), I8, buffer=tensor.buffer, data=tensor.data)


def _pools(rng: Random) -> tuple[memoryview, ...]:
    """Contents: noise, numbers as models have them, large, tiny and none at all."""
    found = np.random.default_rng(rng.getrandbits(32))
    count = POOL // 4
    odd = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1e38, -1e38, 1, 65504], np.float32)
    kinds = (
        found.integers(0, 256, POOL, np.uint8),
        found.standard_normal(count).astype(np.float32),
        found.standard_normal(2 * count).astype(np.float16),
        found.choice(odd, count),
        found.integers(-3, 9, count).astype(np.int32),
        np.full(POOL, 255, np.uint8),
    )
    return tuple(memoryview(kind.tobytes()) for kind in kinds)

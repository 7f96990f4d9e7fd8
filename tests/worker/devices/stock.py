"""The stock worker as one more device, so that the table of cases can be held against it too."""

from collections.abc import Sequence
from dataclasses import dataclass

from drover.coordinator.remote import RemoteBuffer, connect
from drover.ggml.ops import TensorFlag
from drover.ggml.tensor import Shape, Tensor
from drover.ggml.types import I8
from drover.rpc import codec
from drover.rpc.messages import GraphCompute
from drover.worker.devices.device import Node, Operand


@dataclass
class Held:
    """A buffer on the worker, under the interface of a device."""

    remote: RemoteBuffer
    size: int


class StockDevice:
    """The parts of `Device` that `cases.run` uses, over a connection."""

    name = "STOCK"

    def __init__(self, endpoint: str) -> None:
        self._remote = connect(endpoint)[0]

    def alloc(self, size: int) -> Held:
        return Held(self._remote.allocate(size, "a test"), size)

    def free(self, buffer: Held) -> None:
        self._remote.free_buffer(buffer.remote.handle)

    def write(self, buffer: Held, offset: int, data: memoryview) -> None:
        self._remote.set_tensor(_bytes(buffer, offset, len(data)), data)

    def read(self, buffer: Held, offset: int, out: memoryview) -> None:
        self._remote.get_tensor(_bytes(buffer, offset, len(out)), out)

    def compile(self, nodes: Sequence[Node]) -> GraphCompute:
        tensors: list[Tensor] = []
        ids = []
        for node in nodes:
            sources = []
            for operand in node.src:
                if operand is not None:
                    tensors.append(_tensor(len(tensors) + 1, operand))
                sources.append(tensors[-1].id if operand is not None else 0)
            result = _tensor(len(tensors) + 1, node.dst)
            result.op, result.params, result.flags = node.op, node.params, TensorFlag.COMPUTE
            result.src = tuple(sources)
            tensors.append(result)
            ids.append(result.id)
        return codec.encode_graph(0, 0, ids, tensors)

    def run(self, program: GraphCompute) -> None:
        self._remote.graph_compute(program)

    def close(self) -> None:
        self._remote.close()


def _bytes(buffer: Held, offset: int, size: int) -> Tensor:
    ne: Shape = (size, 1, 1, 1)
    return Tensor(1, ne, (1, size, size, size), I8, buffer=buffer.remote.handle, data=buffer.remote.base + offset)


def _tensor(number: int, operand: Operand) -> Tensor:
    assert isinstance(operand.buffer, Held)
    place = operand.buffer.remote
    return Tensor(number, operand.ne, operand.nb, operand.type, buffer=place.handle, data=place.base + operand.offset)

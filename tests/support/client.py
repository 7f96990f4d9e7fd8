"""A client of a worker as small as can be: messages out, replies in, over a real socket; and nonsense on demand."""

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from drover.ggml.ops import Op, TensorFlag
from drover.ggml.tensor import NO_PARAMS, Tensor, contiguous_strides, shape
from drover.ggml.types import F32, TensorType
from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.connection import NEED_DATA, ClientConnection
from support.link import Link


class Client(Link):
    """A greeted connection to a worker."""

    def __init__(self, port: int, greet: bool = True) -> None:
        super().__init__(port)
        self._connection = ClientConnection()
        if greet:
            self.ask(m.Hello())

    def ask(self, request: m.Request, size: int = 0) -> Any:
        """Send a request and return its reply; `size` is that of a raw one."""
        into = memoryview(bytearray(size)) if isinstance(request, m.GetTensor | m.GetTensor2D) else None
        self.raw(b"".join(self._connection.send(request, into)))
        while (event := self._connection.next_event()) is NEED_DATA:
            count = self.socket.recv_into(self._connection.room())
            if count == 0:
                raise EOFError("the worker closed the connection")
            self._connection.filled(count)
        return bytes(event) if isinstance(event, memoryview) else event

    def tell(self, request: m.Request) -> None:
        """Send a request that has no reply."""
        self.raw(b"".join(self._connection.send(request)))

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def get(self, tensor: Tensor, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """All bytes of a tensor, read as `dtype`."""
        return np.frombuffer(self.ask(m.GetTensor(tensor, 0, tensor.nbytes), tensor.nbytes), dtype)

    def set(self, tensor: Tensor, values: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> None:
        """Values into a tensor."""
        self.tell(m.SetTensor(tensor, 0, 0, memoryview(np.array(values, dtype).tobytes())))


class Bench:
    """Tensors laid one after another into a buffer of some client, and graphs of them."""

    def __init__(self, handle: int, base: int, device: int = 0) -> None:
        self.handle = handle
        self.device = device
        self.tensors: list[Tensor] = []
        self._next = base

    @classmethod
    def on(cls, client: Client, size: int = 1 << 16, device: int = 0) -> Self:
        """In a new buffer of a client."""
        handle = client.ask(m.AllocBuffer(device, size)).remote_ptr
        return cls(handle, client.ask(m.BufferGetBase(handle)).base, device)

    def tensor(self, *extents: int, type_: TensorType = F32, **fields: Any) -> Tensor:
        """A new tensor on memory of its own; `fields` replace those of the record."""
        ne = shape(*extents)
        settings: dict[str, Any] = {
            "nb": contiguous_strides(type_, ne),
            "buffer": self.handle,
            "data": self._next,
            "name": f"t{len(self.tensors) + 1}",
            **fields,
        }
        made = Tensor(len(self.tensors) + 1, ne, type=type_, **settings)
        self._next += -(-made.nbytes // 64) * 64 if made.nbytes < 1 << 16 else 0
        self.tensors.append(made)
        return made

    def node(self, op: Op, *src: Tensor, extents: tuple[int, ...] | None = None, **fields: Any) -> Tensor:
        """A tensor to compute, in the shape of its first operand unless told."""
        ne = extents or (src[0].ne if src else (4,))
        ids = tuple(operand.id for operand in src)
        settings = {"op": op, "src": ids, "flags": int(TensorFlag.COMPUTE), "params": NO_PARAMS, **fields}
        return self.tensor(*ne, **settings)

    def graph(self, *nodes: Tensor, uid: int = 0) -> m.GraphCompute:
        """The message that computes these nodes."""
        return codec.encode_graph(self.device, uid, [node.id for node in nodes], self.tensors)


def patched(graph: m.GraphCompute, record: int, at: int, value: int, size: int = 4) -> m.GraphCompute:
    """The same graph with a number overwritten in a record, for values a Tensor cannot hold."""
    table = bytearray(graph.tensors)
    start = record * m.TENSOR_BYTES + at
    table[start : start + size] = value.to_bytes(size, "little")
    return m.GraphCompute(graph.device, graph.uid, graph.nodes, memoryview(table))

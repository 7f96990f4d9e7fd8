"""Message <-> bytes, tensor records and graphs included; the layouts themselves stand in `messages`.

Packed little-endian structs throughout. Damaged input raises RemoteProtocolError, never anything else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, get_type_hints

from drover.errors import LocalProtocolError, RemoteProtocolError
from drover.ggml.ops import MAX_NAME, MAX_SOURCES, Op
from drover.ggml.tensor import Tensor
from drover.ggml.types import TYPES, TensorType
from drover.rpc.messages import (
    COMMAND_OF,
    COMMANDS,
    TENSOR_BYTES,
    Body,
    Command,
    GraphCompute,
    Reply,
    Request,
    SetTensor,
    SetTensor2D,
    Sources,
    Wire,
    WireTensor,
)

Buffers = list[bytes | memoryview]

REQUEST_HEADER = Struct("<BQ")
REPLY_HEADER = Struct("<Q")

_TENSOR = Struct("<QIQ4I4II64si10QQQQ64si")
_GRAPH_HEAD = Struct("<IQI")
_COUNT = Struct("<I")
_NODE_ID_BYTES = 8


def encode_request(request: Request) -> Buffers:
    """The whole frame of a request as buffers for one `sendmsg`; tensor bytes are passed through, not copied."""
    command = COMMAND_OF[type(request)]
    tail: Buffers = []
    if isinstance(request, GraphCompute):
        count = len(request.nodes) // _NODE_ID_BYTES
        head = _GRAPH_HEAD.pack(request.device, request.uid, count)
        tail = [
            request.nodes,
            _COUNT.pack(len(request.tensors) // TENSOR_BYTES),
            request.tensors,
        ]
    else:
        head = _pack(request)
        if isinstance(request, SetTensor | SetTensor2D):
            tail = [request.data]
    size = len(head) + sum(len(part) for part in tail)
    return [REQUEST_HEADER.pack(command.id, size) + head, *tail]


def encode_reply(reply: Reply | memoryview) -> Buffers:
    """The whole frame of a reply; raw bytes are passed through."""
    if isinstance(reply, memoryview):
        return [REPLY_HEADER.pack(len(reply)), reply]
    payload = _pack(reply)
    return [REPLY_HEADER.pack(len(payload)) + payload]


def head_size(command: Command) -> int:
    """Bytes of the fixed part of a request."""
    return _GRAPH_HEAD.size if command.body is Body.GRAPH else _LAYOUTS[command.request].struct.size


def reply_size(command: Command) -> int:
    """Bytes of a reply of fixed size."""
    assert isinstance(command.reply, type)
    return _LAYOUTS[command.reply].struct.size


def decode_request(command: Command, head: bytes | memoryview, body_size: int) -> Request:
    """A request from its fixed part; for `Body.DATA` its `data` is still empty. Graphs: `decode_graph`."""
    request: Request = _unpack(command.request, head)
    if isinstance(request, SetTensor2D) and (body_size == 0 or request.size * request.n_copies != body_size):
        raise RemoteProtocolError(
            f"SET_TENSOR_2D announces {request.n_copies} copies of {request.size} bytes and carries {body_size}"
        )
    return request


def decode_graph(head: bytes | memoryview, body: memoryview) -> GraphCompute:
    """A graph from its fixed part and what follows; bytes behind the table are ignored."""
    device, uid, n_nodes = _GRAPH_HEAD.unpack(head)
    table = n_nodes * _NODE_ID_BYTES + _COUNT.size
    if len(body) < table:
        raise RemoteProtocolError(f"a graph of {n_nodes} nodes does not fit into its {len(body)} bytes")
    (n_tensors,) = _COUNT.unpack_from(body, table - _COUNT.size)
    if len(body) < table + n_tensors * TENSOR_BYTES:
        raise RemoteProtocolError(f"a table of {n_tensors} tensors does not fit into {len(body) - table} bytes")
    return GraphCompute(
        device,
        uid,
        body[: n_nodes * _NODE_ID_BYTES],
        body[table : table + n_tensors * TENSOR_BYTES],
    )


def decode_reply(command: Command, payload: bytes | memoryview) -> Reply:
    """A reply of fixed size."""
    assert isinstance(command.reply, type)
    reply: Reply = _unpack(command.reply, payload)
    return reply


def with_data(request: Request, data: memoryview) -> Request:
    """The same request with its tensor bytes in place."""
    assert isinstance(request, SetTensor | SetTensor2D)
    return replace(request, data=data)


def encode_graph(device: int, uid: int, node_ids: Sequence[int], tensors: Iterable[Tensor]) -> GraphCompute:
    """A GRAPH_COMPUTE message: nodes in execution order, and every tensor reachable from them."""
    nodes = b"".join(node.to_bytes(_NODE_ID_BYTES, "little") for node in node_ids)
    table = b"".join(encode_tensor(tensor) for tensor in tensors)
    return GraphCompute(device, uid, memoryview(nodes), memoryview(table))


def encode_tensor(tensor: Tensor | None) -> bytes:
    """The 296-byte record of a tensor (docs/protocol.md section 3.1); zeros for an absent one."""
    if tensor is None:
        return bytes(TENSOR_BYTES)
    return _TENSOR.pack(
        tensor.id,
        tensor.type.id,
        tensor.buffer,
        *tensor.ne,
        *(stride & 0xFFFFFFFF for stride in tensor.nb),
        tensor.op,
        tensor.params,
        tensor.flags,
        *tensor.src,
        *(0,) * (MAX_SOURCES - len(tensor.src)),
        tensor.view_src,
        tensor.view_offs,
        tensor.data,
        tensor.name.encode()[: MAX_NAME - 1],
        tensor.use_count,
    )


def decode_tensor(raw: bytes | memoryview) -> Tensor:
    """A tensor from its record; RemoteProtocolError for a type or operation that protocol 8.0 does not have."""
    values = _TENSOR.unpack(raw)
    name = values[27].split(b"\0", 1)[0].decode(errors="replace")
    return Tensor(
        id=values[0],
        type=tensor_type(values[1], name),
        buffer=values[2],
        ne=values[3:7],
        nb=values[7:11],
        op=operation(values[11], name),
        params=values[12],
        flags=values[13],
        src=values[14:24],
        view_src=values[24],
        view_offs=values[25],
        data=values[26],
        name=name,
        use_count=values[28],
    )


def tensor_type(number: int, name: str) -> TensorType:
    """The tensor type with this number."""
    try:
        return TYPES[number]
    except KeyError:
        raise RemoteProtocolError(f"tensor {name!r} has type {number}, which protocol 8.0 does not have") from None


def operation(number: int, name: str) -> Op:
    """The operation with this number."""
    try:
        return Op(number)
    except ValueError:
        raise RemoteProtocolError(f"tensor {name!r} has operation {number}, which protocol 8.0 does not have") from None


@dataclass(frozen=True, slots=True)
class _Layout:
    struct: Struct
    names: tuple[str, ...]
    tensors: tuple[int, ...]
    """Which fields are one tensor."""
    sources: tuple[int, ...]
    """Which fields are ten."""


def _read_layout(message: type[Any]) -> _Layout:
    hints = {
        name: hint
        for name, hint in get_type_hints(message, include_extras=True).items()
        if any(isinstance(mark, Wire) for mark in getattr(hint, "__metadata__", ()))
    }
    kinds = list(hints.values())
    return _Layout(
        Struct("<" + "".join(hint.__metadata__[0].code for hint in kinds)),
        tuple(hints),
        tuple(i for i, hint in enumerate(kinds) if hint == WireTensor),
        tuple(i for i, hint in enumerate(kinds) if hint == Sources),
    )


def _pack(message: Request | Reply) -> bytes:
    layout = _LAYOUTS[type(message)]
    values = [getattr(message, name) for name in layout.names]
    for i in layout.tensors:
        values[i] = encode_tensor(values[i])
    for i in layout.sources:
        if len(values[i]) > MAX_SOURCES:
            raise LocalProtocolError(f"{len(values[i])} sources; a tensor has at most {MAX_SOURCES}")
        values[i] = b"".join(encode_tensor(source) for source in values[i])
    return layout.struct.pack(*values)


def _unpack(message: type[Any], raw: bytes | memoryview) -> Any:
    layout = _LAYOUTS[message]
    values: list[Any] = list(layout.struct.unpack(raw))
    for i in layout.tensors:
        values[i] = decode_tensor(values[i])
    for i in layout.sources:
        records = (values[i][at : at + TENSOR_BYTES] for at in range(0, MAX_SOURCES * TENSOR_BYTES, TENSOR_BYTES))
        values[i] = tuple(decode_tensor(record) if any(record) else None for record in records)
    return message(*values)


_LAYOUTS: dict[type[Any], _Layout] = {
    message: _read_layout(message)
    for row in COMMANDS.values()
    for message in (row.request, row.reply)
    if isinstance(message, type) and message is not GraphCompute
}

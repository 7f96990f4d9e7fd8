"""Message <-> bytes, tensor records and graphs included; the layouts themselves stand in `messages`.

Packed little-endian structs throughout. Damaged input raises RemoteProtocolError, never anything else. Requests of
older versions are read into today's messages, and their tensor records rewritten as today's (`versions`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from struct import Struct
from types import MappingProxyType
from typing import Any, get_type_hints

from drover.errors import LocalProtocolError, RemoteProtocolError
from drover.ggml.ops import MAX_NAME, MAX_SOURCES, Op, TensorFlag
from drover.ggml.tensor import Tensor
from drover.ggml.types import TYPES, TensorType
from drover.rpc.messages import (
    COMMAND_OF,
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
from drover.rpc.versions import CURRENT, Version

Buffers = list[bytes | memoryview]

REQUEST_HEADER = Struct("<BQ")
REPLY_HEADER = Struct("<Q")

_TENSOR = Struct("<QIQ4I4II64si10QQQQ64si")
_WORD = Struct("<I")
_NODE_ID_BYTES = 8
_NOTHING: Mapping[str, object] = MappingProxyType({})
_OP_AT, _PARAMS_AT, _FLAGS_AT, _NAME_AT = 52, 56, 120, 228
"""Where a tensor record holds what older versions meant otherwise, and its name."""


def encode_request(request: Request) -> Buffers:
    """The whole frame of a request as buffers for one `sendmsg`; tensor bytes are passed through, not copied."""
    command = COMMAND_OF[type(request)]
    tail: Buffers = []
    if isinstance(request, GraphCompute):
        count = len(request.nodes) // _NODE_ID_BYTES
        head = _pack(request) + _WORD.pack(count)
        tail = [
            request.nodes,
            _WORD.pack(len(request.tensors) // TENSOR_BYTES),
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


@cache
def head_size(command: Command) -> int:
    """Bytes of the fixed part of a request."""
    count = _WORD.size if command.body is Body.GRAPH else 0
    return _request_layout(command).struct.size + count


def reply_size(command: Command) -> int:
    """Bytes of a reply of fixed size."""
    assert isinstance(command.reply, type)
    return _layout(command.reply).struct.size


def decode_request(command: Command, head: bytes | memoryview, body_size: int, version: Version = CURRENT) -> Request:
    """A request from its fixed part; for `Body.DATA` its `data` is still empty. Graphs: `decode_graph`."""
    absent = {name: value(body_size) for name, value in command.absent}
    request: Request = _unpack(command.request, _request_layout(command), head, version, absent)
    if isinstance(request, SetTensor2D) and (body_size == 0 or request.size * request.n_copies != body_size):
        raise RemoteProtocolError(
            f"SET_TENSOR_2D announces {request.n_copies} copies of {request.size} bytes and carries {body_size}"
        )
    return request


def decode_graph_head(head: bytes | memoryview, body_size: int, version: Version = CURRENT) -> GraphCompute:
    """A graph of which only the fixed part is here: what it is for, and no nodes yet."""
    command = version.commands[COMMAND_OF[GraphCompute].id]
    fields: dict[str, Any] = {name: value(body_size) for name, value in command.absent}
    layout = _request_layout(command)
    fields |= zip(layout.names, layout.struct.unpack_from(head), strict=True)
    return GraphCompute(**fields, nodes=memoryview(b""), tensors=memoryview(b""))


def decode_graph(head: bytes | memoryview, body: memoryview, version: Version = CURRENT) -> GraphCompute:
    """A graph from its fixed part and what follows; bytes behind the table are ignored."""
    graph = decode_graph_head(head, len(body), version)
    (n_nodes,) = _WORD.unpack_from(head, len(head) - _WORD.size)
    table = n_nodes * _NODE_ID_BYTES + _WORD.size
    if len(body) < table:
        raise RemoteProtocolError(f"a graph of {n_nodes} nodes does not fit into its {len(body)} bytes")
    (n_tensors,) = _WORD.unpack_from(body, table - _WORD.size)
    if len(body) < table + n_tensors * TENSOR_BYTES:
        raise RemoteProtocolError(f"a table of {n_tensors} tensors does not fit into {len(body) - table} bytes")
    tensors = body[table : table + n_tensors * TENSOR_BYTES]
    if not version.same_records:
        _rewrite(tensors, version)
    return replace(graph, nodes=body[: n_nodes * _NODE_ID_BYTES], tensors=tensors)


def decode_reply(command: Command, payload: bytes | memoryview) -> Reply:
    """A reply of fixed size."""
    assert isinstance(command.reply, type)
    reply: Reply = _unpack(command.reply, _layout(command.reply), payload)
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


def _rewrite(records: memoryview, version: Version) -> None:
    """Tensor records of an older version, in place, as they would be today; RemoteProtocolError for what it lacks."""
    for at in range(0, len(records), TENSOR_BYTES):
        number: int = _WORD.unpack_from(records, at + _OP_AT)[0]
        op = version.operations.get(number)
        if op is None:
            name = bytes(records[at + _NAME_AT : at + _NAME_AT + MAX_NAME]).split(b"\0", 1)[0].decode(errors="replace")
            raise RemoteProtocolError(f"tensor {name!r} has operation {number}, which protocol {version} does not have")
        _WORD.pack_into(records, at + _OP_AT, op)
        if op in version.params:
            (value,) = _WORD.unpack_from(records, at + _PARAMS_AT)
            _WORD.pack_into(records, at + _PARAMS_AT, version.params[op].get(value, value))
        if not version.marks_nodes:
            (flags,) = _WORD.unpack_from(records, at + _FLAGS_AT)
            _WORD.pack_into(records, at + _FLAGS_AT, flags | TensorFlag.COMPUTE)


def _read_tensor(raw: bytes | memoryview, version: Version) -> Tensor:
    """A tensor from a record of that version."""
    if version.same_records:
        return decode_tensor(raw)
    record = bytearray(raw)
    _rewrite(memoryview(record), version)
    return decode_tensor(bytes(record))


@dataclass(frozen=True, slots=True)
class _Layout:
    struct: Struct
    names: tuple[str, ...]
    tensors: tuple[int, ...]
    """Which fields are one tensor."""
    sources: tuple[int, ...]
    """Which fields are ten."""


def _layout(message: Any, absent: frozenset[str] = frozenset()) -> _Layout:
    """How a class of messages lies on the wire, without the fields that are absent there."""
    return _read_layout(message, absent)


@cache
def _read_layout(message: type[Any], absent: frozenset[str]) -> _Layout:
    hints = {
        name: hint
        for name, hint in get_type_hints(message, include_extras=True).items()
        if any(isinstance(mark, Wire) for mark in getattr(hint, "__metadata__", ())) and name not in absent
    }
    kinds = list(hints.values())
    return _Layout(
        Struct("<" + "".join(hint.__metadata__[0].code for hint in kinds)),
        tuple(hints),
        tuple(i for i, hint in enumerate(kinds) if hint == WireTensor),
        tuple(i for i, hint in enumerate(kinds) if hint == Sources),
    )


@cache
def _request_layout(command: Command) -> _Layout:
    return _layout(command.request, frozenset(name for name, _ in command.absent))


def _pack(message: Request | Reply) -> bytes:
    layout = _layout(type(message))
    values = [getattr(message, name) for name in layout.names]
    for i in layout.tensors:
        values[i] = encode_tensor(values[i])
    for i in layout.sources:
        if len(values[i]) > MAX_SOURCES:
            raise LocalProtocolError(f"{len(values[i])} sources; a tensor has at most {MAX_SOURCES}")
        values[i] = b"".join(encode_tensor(source) for source in values[i])
    return layout.struct.pack(*values)


def _unpack(
    message: type[Any],
    layout: _Layout,
    raw: bytes | memoryview,
    version: Version = CURRENT,
    absent: Mapping[str, object] = _NOTHING,
) -> Any:
    values: list[Any] = list(layout.struct.unpack(raw))
    for i in layout.tensors:
        values[i] = _read_tensor(values[i], version)
    for i in layout.sources:
        records = (values[i][at : at + TENSOR_BYTES] for at in range(0, MAX_SOURCES * TENSOR_BYTES, TENSOR_BYTES))
        values[i] = tuple(_read_tensor(record, version) if any(record) else None for record in records)
    return message(**absent, **dict(zip(layout.names, values, strict=True))) if absent else message(*values)

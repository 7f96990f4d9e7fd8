"""Frames as bytes, of every version: encoded, taken apart into fields, and what each would be answered with."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

from drover.rpc import codec
from drover.rpc import messages as m
from drover.rpc.versions import VERSIONS, Version

HEADER = struct.Struct("<BQ")
_OP_AT = 52
RECORD_FIELDS: tuple[tuple[int, int], ...] = (
    (0, 8),
    (8, 4),
    (12, 8),
    *((20 + 4 * i, 4) for i in range(8)),
    (52, 4),
    *((56 + 4 * i, 4) for i in range(16)),
    (120, 4),
    *((124 + 8 * i, 8) for i in range(13)),
    (292, 4),
)
"""Offset and size of the numbers of a tensor record (docs/protocol.md section 3.1)."""


@dataclass(frozen=True)
class Layout:
    """Where the fixed part of a payload holds numbers, and where tensor records."""

    size: int
    numbers: tuple[tuple[int, int], ...]
    records: tuple[int, ...]


def encode(request: m.Request, version: Version) -> bytes | None:
    """The frame as that version has it; None if it has no such command, or no such operation."""
    command = version.commands.get(m.COMMAND_OF[type(request)].id)
    if command is None:
        return None
    frame = b"".join(codec.encode_request(request))
    if not command.absent and version.same_records:
        return frame
    payload = bytearray(frame[HEADER.size :])
    places = list(_layout(m.COMMAND_OF[type(request)]).records)
    if isinstance(request, m.GraphCompute):
        start = len(payload) - len(request.tensors)
        places = list(range(start, len(payload), m.TENSOR_BYTES))
    for at in places:
        (op,) = struct.unpack_from("<I", payload, at + _OP_AT)
        number = _numbers(version.number).get(op)
        if number is None:
            return None
        struct.pack_into("<I", payload, at + _OP_AT, number)
    for start, size in sorted(_fields(m.COMMAND_OF[type(request)], absent=command), reverse=True):
        del payload[start : start + size]
    return HEADER.pack(command.id, len(payload)) + payload


def layout(number: int, version: Version) -> Layout | None:
    """What is where in the payload of this command."""
    command = version.commands.get(number)
    return None if command is None else _layout(command)


def answers(stream: bytes, version: Version, also: Version | None) -> list[int]:
    """The sizes of the answers to a client's bytes if every whole frame in them was served."""
    sizes: list[int] = []
    at = 0
    if also is not None and stream[: HEADER.size] == HEADER.pack(also.hello.id, 0):
        version = also
    while at + HEADER.size <= len(stream):
        number, size = HEADER.unpack_from(stream, at)
        at += HEADER.size
        command = version.commands.get(number)
        if command is None or at + size > len(stream) or size < codec.head_size(command):
            break
        if command.reply is m.RAW:
            (count,) = struct.unpack_from("<Q", stream, at + 304)
            copies = struct.unpack_from("<Q", stream, at + 312)[0] if command.request is m.GetTensor2D else 1
            sizes.append(count * copies)
        elif command.reply is not None:
            sizes.append(codec.reply_size(command))
        at += size
    return sizes


@cache
def _numbers(version: tuple[int, int, int]) -> dict[int, int]:
    (found,) = (row for row in VERSIONS.values() if row.number == version)
    return {int(op): number for number, op in found.operations.items()}


@cache
def _layout(command: m.Command) -> Layout:
    numbers: list[tuple[int, int]] = []
    records: list[int] = []
    size = 0
    for start, width in _fields(command):
        size = start + width
        if width % m.TENSOR_BYTES:
            numbers.append((start, width))
        else:
            records.extend(range(start, start + width, m.TENSOR_BYTES))
    return Layout(size, tuple(numbers), tuple(records))


def _fields(command: m.Command, absent: m.Command | None = None) -> Iterator[tuple[int, int]]:
    """Offset and size of the fields on the wire; or, of those that another version of the command lacks."""
    lacking = {name for name, _ in (absent or command).absent}
    at = 0
    for name, hint in get_type_hints(command.request, include_extras=True).items():
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, m.Wire)]
        if not marks or (absent is None and name in lacking):
            continue
        size = struct.calcsize("<" + marks[0].code)
        if absent is None or name in lacking:
            yield at, size
        at += size

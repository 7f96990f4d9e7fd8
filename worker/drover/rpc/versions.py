"""VERSIONS, the table of all that a worker can serve: commands, their layouts and answers, the numbers of operations.

A version is told by how it differs from the next newer one; requests of each are read into today's messages
(docs/protocol.md section 10). Operations of 2.0.0, 3.6.1, 4.0.0, 4.0.1, 4.0.2, 5.0.0 and 7.0.0 are numbered as in
llama-cpp-python 0.3.16, 0.3.17, 0.3.24, 0.3.33, 0.3.34, 0.3.35 and 0.3.36. 4.0.3, 5.1.0 and 6.0.0 have as many as 5.0.0
and 7.0.0, which have the same. What is not known for certain is not here: the numbers in 3.0.0, 3.5.0 and 3.6.0, and
those in other releases that called themselves 2.0.0 (0.3.16 has 88 operations; some had 82, some 86).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from drover.errors import DroverError
from drover.ggml.ops import Op, Unary
from drover.rpc import messages as m
from drover.rpc.version_names import BRIEF, NAMES

LAST_GRAPH = 1
"""The uid of every graph of a client that names none: GRAPH_RECOMPUTE means the last one of its device."""
HASHED_BYTES = 10 << 20
"""Larger tensors were meant to be cached before 7.0, whatever they held (docs/protocol.md section 4.1)."""

Message = type[m.Request]
Absent = Mapping[Message, Mapping[str, Callable[[int], object]]]
Params = Mapping[Op, Mapping[int, int]]
_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Version:
    """A row: all that a connection has to know of the version it speaks."""

    number: tuple[int, int, int]
    commands: Mapping[int, m.Command]
    operations: Mapping[int, Op]
    """Numbers of operations on the wire."""
    params: Params
    """Values of parameter 0 that meant something else, and what they are today."""
    marks_nodes: bool
    """Whether nodes that are to run carry TensorFlag.COMPUTE; else all do."""

    def __str__(self) -> str:
        return ".".join(map(str, self.number))

    @property
    def hello(self) -> m.Command:
        """The command that comes first."""
        return self.commands[m.COMMAND_OF[m.Hello].id]

    @property
    def greets_briefly(self) -> bool:
        """Whether HELLO is empty: this, and nothing else of its version, can be told of a client."""
        return bool(self.hello.absent)

    @property
    def greeting(self) -> m.HelloReply | m.ShortHelloReply:
        """The answer to HELLO."""
        return m.ShortHelloReply(*self.number) if self.greets_briefly else m.HelloReply(*self.number)

    @property
    def same_records(self) -> bool:
        """Whether tensor records mean what they mean today."""
        return len(self.operations) == len(Op) and not self.params and self.marks_nodes


def _before(
    newer: Version,
    number: tuple[int, int, int],
    *,
    gone: frozenset[Message] = frozenset(),
    absent: Absent = _NONE,
    replies: Mapping[Message, type[m.Reply]] = _NONE,
    operations: frozenset[Op] = frozenset(),
    params: Params = _NONE,
    marks_nodes: bool = True,
) -> Version:
    """The version before: without commands and operations that were not there yet, with other layouts and replies."""

    def row(command: m.Command) -> m.Command:
        fields = {**dict(command.absent), **absent.get(command.request, {})}
        reply = replies.get(command.request, command.reply)
        return replace(command, reply=reply, absent=tuple(fields.items()))

    left = [op for op in newer.operations.values() if op not in operations]
    return Version(
        number,
        {id_: row(command) for id_, command in newer.commands.items() if command.request not in gone},
        dict(enumerate(left)),
        {**newer.params, **params},
        newer.marks_nodes and marks_nodes,
    )


def _always(value: object) -> Callable[[int], object]:
    return lambda _size: value


_DEVICE = {"device": _always(0)}
_UID = {"uid": _always(LAST_GRAPH)}
_ONE_STATE = {0: 1}
_DSV4 = frozenset((Op.DSV4_HC_COMB, Op.DSV4_HC_PRE, Op.DSV4_HC_POST))

CURRENT = Version(m.VERSION, m.COMMANDS, {int(op): op for op in Op}, {}, marks_nodes=True)
_7_0_0 = _before(
    CURRENT,
    (7, 0, 0),
    gone=frozenset((m.SetTensor2D, m.GetTensor2D, m.CommInit, m.CommAllreduce, m.CommFree)),
    absent={m.GraphCompute: _UID, m.GraphRecompute: _UID},
)
_6_0_0 = _before(_7_0_0, (6, 0, 0), absent={m.SetTensor: {"cache_flag": lambda size: int(size > HASHED_BYTES)}})
_5_1_0 = _before(
    _6_0_0,
    (5, 1, 0),
    replies={m.FreeBuffer: m.Done, m.BufferClear: m.Done, m.InitTensor: m.Done, m.MemsetTensor: m.Done},
)
_5_0_0 = _before(_5_1_0, (5, 0, 0))
_4_0_3 = _before(
    _5_0_0,
    (4, 0, 3),
    gone=frozenset((m.MemsetTensor,)),
    params={Op.SSM_SCAN: _ONE_STATE, Op.GATED_DELTA_NET: _ONE_STATE},
)
_4_0_2 = _before(_4_0_3, (4, 0, 2), operations=_DSV4)
_4_0_1 = _before(_4_0_2, (4, 0, 1), operations=frozenset((Op.LIGHTNING_INDEXER,)))
_4_0_0 = _before(_4_0_1, (4, 0, 0), operations=frozenset((Op.COL2IM_1D,)))
_3_6_1 = _before(
    _4_0_0, (3, 6, 1), absent={m.Hello: {"caps": _always(m.NO_CAPS)}}, replies={m.Hello: m.ShortHelloReply}
)
_2_0_0 = _before(
    _3_6_1,
    (2, 0, 0),
    gone=frozenset((m.DeviceCount, m.GraphRecompute)),
    absent={
        m.AllocBuffer: _DEVICE,
        m.GetAlignment: _DEVICE,
        m.GetMaxSize: _DEVICE,
        m.GetDeviceMemory: _DEVICE,
        m.GetAllocSize: {**_DEVICE, "sources": _always(())},
        m.GraphCompute: {**_DEVICE, "uid": _always(0)},
    },
    replies={m.GraphCompute: m.GraphComputeReply},
    operations=frozenset(
        (Op.CUMSUM, Op.IM2COL_3D, Op.CONV_3D, Op.TOP_K, Op.TRI, Op.FILL, Op.SOLVE_TRI, Op.GATED_DELTA_NET)
    ),
    params={Op.UNARY: {14: int(Unary.GELU_ERF)}},
    marks_nodes=False,
)

_ROWS = (CURRENT, _7_0_0, _6_0_0, _5_1_0, _5_0_0, _4_0_3, _4_0_2, _4_0_1, _4_0_0, _3_6_1, _2_0_0)
VERSIONS: dict[str, Version] = dict(zip(NAMES, _ROWS, strict=True))


def pair(main: str, also: str | None) -> tuple[Version, Version | None]:
    """The version to serve and the one beside it, by name; DroverError if one is not here or HELLO cannot tell them."""
    version = _named(main)
    if also is None:
        return version, None
    second = _named(also)
    if version.greets_briefly or not second.greets_briefly:
        raise DroverError(
            f"protocols {main} and {also} cannot share a port: only one of 4.0 or newer (--protocol) and one of "
            f"{' or '.join(BRIEF)} (--also) greet differently"
        )
    return version, second


def _named(name: str) -> Version:
    try:
        return VERSIONS[name]
    except KeyError:
        raise DroverError(f"protocol {name!r} is not served; those that are: {', '.join(VERSIONS)}") from None

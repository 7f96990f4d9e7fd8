"""Calls by address of the functions that several kernels share.

Linked into every kernel that calls them, they would be compiled once for each level of callers. They are compiled once
(see `callees`), and a table of their addresses reaches kernels through the synchronisation block.
"""

from typing import Any

from llvmlite import ir

from drover.worker.devices.cpu.simd import I64, emits, i64, read, void
from drover.worker.devices.cpu.sync import CALLEES

ENTRIES: list[tuple[str, int]] = []
"""What the table holds, in order: the names of functions, and how many arguments they take; all are integers."""


def _callee(name: str, count: int) -> Any:
    place = 8 * len(ENTRIES)
    ENTRIES.append((name, count))

    def call_by_address(b: Any, table: Any, *arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        b.call(b.inttoptr(read(b, b.add(table, I64(place)), I64), kind.as_pointer()), (table, *arguments))

    call_by_address.__name__ = f"call_{name}"
    return emits(void, *[i64] * count)(call_by_address)


# The first argument of each is the address of the table.
times_columns = _callee("times_columns", 12)
pack = _callee("pack", 12)
pack_k = _callee("pack_k", 12)
multiply_panel = _callee("multiply_panel", 11)
multiply_panel_k = _callee("multiply_panel_k", 11)
prepare = _callee("prepare", 8)
look_up = _callee("look_up", 5)
dequantize = _callee("dequantize", 6)
quantize = _callee("quantize", 5)


@emits(i64, i64)
def table_of(b: Any, sync: Any) -> Any:
    """The address of the table."""
    return read(b, b.add(sync, I64(CALLEES)), I64)

"""The one compiled function that Python calls: it executes the records of a program, in every thread.

A kernel is a function of six integers: the address of its record, the number of the calling thread, the number of
threads, and the addresses of the thread's scratch, of the memory all threads share, and of the synchronisation block.
Kernels are compiled apart from one another and called by address: linked into one, they would take minutes to optimise.
Between records all threads meet, except where the program says that they need not (see `record.FLAGS`).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
from llvmlite import ir

from drover.worker.devices.cpu import (
    attention,
    callees,
    calls,
    copy,
    elementwise,
    experts,
    matmul,
    norm,
    record,
    recurrent,
    reductions,
    rope,
    routing,
    sorting,
    streams,
    windows,
)
from drover.worker.devices.cpu.record import (
    COUNTER,
    COUNTER2,
    ERROR,
    FLAGS,
    KERNEL,
    NO_BARRIER,
    RECORD_BYTES,
    SOLO,
)
from drover.worker.devices.cpu.simd import I64, atomic_store, clock, emits, i64, jit, store_i64, void
from drover.worker.devices.cpu.sync import BAD_RECORD, barrier
from drover.worker.devices.cpu.vector import word

KERNELS: dict[int, Callable[..., None]] = {
    record.BINARY: elementwise.binary,
    record.UNARY: elementwise.unary,
    record.GLU: elementwise.glu,
    record.NORM: norm.norm,
    record.ROPE: rope.rope,
    record.SOFT_MAX: norm.soft_max,
    record.GET_ROWS: copy.get_rows,
    record.SET_ROWS: copy.set_rows,
    record.SET_ELEMENTS: copy.set_elements,
    record.COPY: copy.copy,
    record.CONCAT: copy.concat,
    record.REPEAT: copy.repeat,
    record.SUM_ROWS: norm.sum_rows,
    record.ARGSORT: sorting.argsort,
    record.ATTENTION: attention.attention,
    record.MUL_MAT: matmul.mul_mat,
    record.MUL_MAT_ID: experts.mul_mat_id,
    record.ADD_ID: routing.add_id,
    record.TOP_FEW: sorting.top_few,
    record.ARGMAX: routing.argmax,
    record.LIGHTNING_INDEXER: routing.lightning_indexer,
    record.ARANGE: windows.arange,
    record.PAD: windows.pad,
    record.BAND: windows.band,
    record.WINDOW: windows.window,
    record.POOL: windows.pool,
    record.TOTAL: reductions.total,
    record.CUMSUM: reductions.cumsum,
    record.GROUP_NORM: reductions.group_norm,
    record.SOLVE_TRI: reductions.solve_tri,
    record.SSM_CONV: recurrent.ssm_conv,
    record.SSM_SCAN: recurrent.ssm_scan,
    record.GATED_DELTA_NET: recurrent.gated_delta_net,
    record.WKV7: recurrent.wkv7,
    record.LINEAR_ATTENTION: recurrent.linear_attention,
    record.HC_PRE: streams.hc_pre,
    record.HC_POST: streams.hc_post,
    record.HC_COMB: streams.hc_comb,
}
"""The kernel of each opcode."""

_ARGUMENTS, _RUN_ARGUMENTS = 6, 8


@jit
def run(
    thread: int, threads: int, program: int, records: int, sync: int, scratch: int, shared: int, ticks: int
) -> None:
    """Execute `records` records at `program` as thread number `thread`; all threads leave together.

    At `ticks`, unless it is 0, thread 0 writes what the processor's clock says: at the start, and after each record.
    """
    if thread == 0:
        atomic_store(sync + BAD_RECORD, 0)
        for i in range(records):
            at = program + i * RECORD_BYTES
            store_i64(at + 8 * COUNTER, 0)
            store_i64(at + 8 * COUNTER2, 0)
            store_i64(at + 8 * ERROR, 0)
    barrier(sync, threads)
    if thread == 0 and ticks != 0:
        store_i64(ticks, clock())
    for i in range(records):
        at = program + i * RECORD_BYTES
        flags = word(at, FLAGS)
        alone = flags & SOLO != 0
        if not alone or thread == 0:
            _call(word(at, KERNEL), at, thread, 1 if alone else threads, scratch, shared, sync)
        if flags & NO_BARRIER == 0:
            barrier(sync, threads)
        if thread == 0 and ticks != 0:
            store_i64(ticks + 8 * (i + 1), clock())


@emits(void, *[i64] * (1 + _ARGUMENTS))
def _call(b: Any, kernel: Any, *arguments: Any) -> None:
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)
    b.call(b.inttoptr(kernel, kind.as_pointer()), arguments)


def parts() -> list[Callable[[], object]]:
    """All that a device compiles, in parts that need nothing of one another: those that take long come first."""
    callees_ = [partial(callees.compile_callee, name) for name, _ in calls.ENTRIES]
    return [*callees_, *(partial(compile_kernel, opcode) for opcode in KERNELS), _compile_run]


def _compile_run() -> None:
    run.compile(numba.void(*[numba.int64] * _RUN_ARGUMENTS))  # type: ignore[attr-defined]  # of what `jit` makes


def compile_kernel(opcode: int) -> int:
    """The address of an opcode's kernel, compiled for this processor or loaded from numba's cache; good for ever."""
    return int(_compiled(opcode).address)


@cache  # also because the code goes when the object does
def _compiled(opcode: int) -> Any:
    function = KERNELS[opcode]
    return callees.compiled(getattr(function, "py_func", function), _ARGUMENTS)

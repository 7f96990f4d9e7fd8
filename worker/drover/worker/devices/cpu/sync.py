"""How the threads of a program meet: a barrier, work handed out by a counter, and the report of a bad index.

The barrier waits by spinning, since an operation is shorter than a system call; it gives the processor away after a
while, since there may be fewer processors than threads.
"""

from collections.abc import Iterator

from numba.core import types

from drover.worker.devices.cpu.record import COUNTER, ERROR, ERROR_VALUE
from drover.worker.devices.cpu.simd import atomic_add, atomic_load, atomic_store, jit, jit_generator, pause, store_i64
from drover.worker.devices.cpu.vector import word

ARRIVED = 0
"""Byte offsets in the synchronisation block, each on a cache line of its own: threads at the barrier,"""
GENERATION = 64
"""barriers passed,"""
BAD_RECORD = 128
"""the address of a record that met an index out of range,"""
CALLEES = 192
"""and the address of the table of functions that kernels call (see `calls`)."""
SYNC_BYTES = 256

_SPINS = 400

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@jit
def barrier(sync: int, threads: int) -> None:
    """Wait until all threads are here."""
    if threads == 1:
        return
    generation = atomic_load(sync + GENERATION)
    if atomic_add(sync + ARRIVED, 1) == threads - 1:
        atomic_store(sync + ARRIVED, 0)
        atomic_store(sync + GENERATION, generation + 1)
        return
    spins = 0
    while atomic_load(sync + GENERATION) == generation:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _sched_yield()


@jit_generator
def each_item(record: int, items: int, amount: int) -> Iterator[int]:
    """The numbers of the items of a record that this thread does, claimed `amount` at a time."""
    while True:
        first = atomic_add(record + 8 * COUNTER, amount)
        if first >= items:
            break
        for item in range(first, min(first + amount, items)):  # noqa: UP028  numba knows no `yield from`
            yield item


@jit_generator
def each_run(record: int, items: int, least: int, most: int, threads: int) -> Iterator[tuple[int, int]]:
    """Runs of items that this thread does, the first of each and how many: long ones first, lest memory be asked for
    here and there, then ever shorter ones, so that threads end together. Each claims half a thread's share of the rest.
    """
    most = max(least, most)
    longest = max(0, items // (threads * most) - 1)  # rounds in which everybody takes `most`
    while True:
        claim = atomic_add(record + 8 * COUNTER, 1)
        turn = claim // threads
        first = min(turn, longest) * threads * most
        size = max(least, min(most, (items - first) // (2 * threads)))
        for _ in range(turn - longest):
            first += threads * size
            size = max(least, min(most, (items - first) // (2 * threads)))
        first += claim % threads * size
        if first >= items:
            break
        yield first, min(size, items - first)


@jit_generator
def each_stretch(
    record: int, groups: int, rows: int, least: int, most: int, longest: int, threads: int
) -> Iterator[tuple[int, int, int]]:
    """The runs of this thread over the rows of all groups, cut where a group ends and after `longest` rows: the group,
    its first row, and how many.
    """
    for run, length in each_run(record, groups * rows, least, most, threads):
        at = run
        while at < run + length:
            first = at % rows
            some = min(run + length - at, rows - first, longest)
            yield at // rows, first, some
            at += some


@jit_generator
def each_row(record: int, extents: int, threads: int) -> Iterator[tuple[int, int, int]]:
    """Where the rows lie that this thread does, of the operand whose extents the record has from this word on."""
    ne1, ne2 = word(record, extents + 1), word(record, extents + 2)
    rows = ne1 * ne2 * word(record, extents + 3)
    for row in each_item(record, rows, portion(rows, threads)):
        yield row % ne1, row // ne1 % ne2, row // (ne1 * ne2)


@jit
def portion(items: int, threads: int) -> int:
    """How many items to claim at a time: a few claims for each thread."""
    return max(1, items // (threads * 8))


@jit
def report_bad_index(record: int, sync: int, value: int) -> None:
    """Remember that a record met this index; the run goes on without the row."""
    store_i64(record + 8 * ERROR_VALUE, value)
    store_i64(record + 8 * ERROR, 1)
    atomic_store(sync + BAD_RECORD, record)

"""Small matrix products on floats, and the turning of their operands; strides are in bytes."""

from typing import Any

from drover.worker.devices.cpu.simd import (
    F32,
    I64,
    broadcast,
    constant,
    emits,
    f32x4,
    f32x16,
    fused,
    i64,
    jit,
    joined,
    read,
    shuffle,
    void,
    write,
)


@jit
def multiply(
    a: int, a_step: int, m: int, m_step: int, c: int, c_step: int, depth: int, rows: int, columns: int
) -> None:
    """c += a · m; a [rows, depth], m [depth, columns], columns a multiple of 16."""
    row = 0
    while row + 4 <= rows:
        _multiply_rows(a + row * a_step, a_step, m, m_step, c + row * c_step, c_step, depth, columns)
        row += 4
    while row < rows:
        _multiply_row(a + row * a_step, m, m_step, c + row * c_step, depth, columns)
        row += 1


@jit
def _multiply_rows(a: int, a_step: int, m: int, m_step: int, c: int, c_step: int, depth: int, columns: int) -> None:
    j = 0
    while j + 64 <= columns:
        _block4x4(a, a_step, m + 4 * j, m_step, c + 4 * j, c_step, depth)
        j += 64
    while j + 32 <= columns:
        _block4x2(a, a_step, m + 4 * j, m_step, c + 4 * j, c_step, depth)
        j += 32
    if j < columns:
        _block4x1(a, a_step, m + 4 * j, m_step, c + 4 * j, c_step, depth)


@jit
def _multiply_row(a: int, m: int, m_step: int, c: int, depth: int, columns: int) -> None:
    j = 0
    while j + 64 <= columns:
        _block1x4(a, 0, m + 4 * j, m_step, c + 4 * j, 0, depth)
        j += 64
    while j < columns:
        _block1x1(a, 0, m + 4 * j, m_step, c + 4 * j, 0, depth)
        j += 16


def _block(rows: int, vectors: int) -> Any:
    """An instruction that multiplies `rows` rows with 16 · `vectors` columns, all sums in registers."""
    places = [(r, v) for r in range(rows) for v in range(vectors)]

    def block(b: Any, a: Any, a_step: Any, m: Any, m_step: Any, c: Any, c_step: Any, depth: Any) -> None:
        def at(base: Any, index: Any, step: Any, more: int = 0) -> Any:
            return b.add(b.add(base, b.mul(index, step)), I64(more))

        starts = [read(b, at(c, I64(r), c_step, 64 * v), f32x16.ir) for r, v in places]

        def body(i: Any, sums: list[Any]) -> list[Any]:
            line = [read(b, at(m, i, m_step, 64 * v), f32x16.ir) for v in range(vectors)]
            factors = [at(at(a, I64(r), a_step), i, I64(4)) for r in range(rows)]
            spread = [broadcast(b, read(b, place, F32), 16) for place in factors]
            return [fused(b, spread[r], line[v], total) for (r, v), total in zip(places, sums, strict=True)]

        for (r, v), total in zip(places, loop(b, depth, starts, body), strict=True):
            write(b, at(c, I64(r), c_step, 64 * v), total)

    block.__name__ = f"block{rows}x{vectors}"
    return emits(void, *[i64] * 7)(block)


def loop(b: Any, count: Any, starts: list[Any], body: Any) -> list[Any]:
    """Values carried through `count` ≥ 1 rounds of `body(index, values)`."""
    before, inside = b.block, b.append_basic_block("round")
    b.branch(inside)
    b.position_at_end(inside)
    index = b.phi(I64)
    index.add_incoming(I64(0), before)
    carried = []
    for start in starts:
        value = b.phi(start.type)
        value.add_incoming(start, before)
        carried.append(value)
    results = body(index, carried)
    following = b.add(index, I64(1))
    end, after = b.block, b.append_basic_block("after")
    index.add_incoming(following, end)
    for value, result in zip(carried, results, strict=True):
        value.add_incoming(result, end)
    b.cbranch(b.icmp_signed("<", following, count), inside, after)
    b.position_at_end(after)
    return results


_block4x4, _block4x2, _block4x1, _block1x4, _block1x1 = (
    _block(rows, vectors) for rows, vectors in ((4, 4), (4, 2), (4, 1), (1, 4), (1, 1))
)


@emits(f32x16, i64, i64, i64, i64)
def dots(b: Any, q: Any, k: Any, step: Any, count: Any) -> Any:
    """The products of one row with 16 rows `step` bytes apart, all of 16 · `count` floats."""

    def body(i: Any, sums: list[Any]) -> list[Any]:
        shift = b.mul(i, I64(64))
        x = read(b, b.add(q, shift), f32x16.ir)
        rows = [read(b, b.add(b.add(k, shift), b.mul(step, I64(j))), f32x16.ir) for j in range(16)]
        return [fused(b, x, row, total) for row, total in zip(rows, sums, strict=True)]

    sums = loop(b, count, [constant(f32x16, 0.0)] * 16, body)
    for s in (8, 4, 2, 1):  # pairs of vectors fold into one: lanes with bit s from the second
        sums = [_fold(b, sums[j], sums[j + s], s) for j in range(s)]
    return sums[0]


def _fold(b: Any, x: Any, y: Any, s: int) -> Any:
    own = shuffle(b, x, [16 + (j ^ s) if j & s else j for j in range(16)], y)
    other = shuffle(b, x, [16 + j if j & s else j | s for j in range(16)], y)
    return b.fadd(own, other)


@emits(void, i64, i64, i64, i64)
def transpose(b: Any, source: Any, source_step: Any, target: Any, target_step: Any) -> None:
    """Turn rows of 16 floats into columns, 16 by 16, exchanging halves, quarters, eighths and neighbours."""
    rows = [read(b, b.add(source, b.mul(source_step, I64(i))), f32x16.ir) for i in range(16)]
    for s in (1, 2, 4, 8):
        turned = list(rows)
        for i in (i for i in range(16) if not i & s):
            x, y = rows[i], rows[i | s]
            turned[i] = shuffle(b, x, [16 + (j ^ s) if j & s else j for j in range(16)], y)
            turned[i | s] = shuffle(b, x, [16 + j if j & s else j | s for j in range(16)], y)
        rows = turned
    for i, row in enumerate(rows):
        write(b, b.add(target, b.mul(target_step, I64(i))), row)


@emits(void, i64, i64, i64, i64)
def transpose_few(b: Any, source: Any, source_step: Any, target: Any, target_step: Any) -> None:
    """Turn the first four floats of 16 rows into four columns of 16."""
    rows = [read(b, b.add(source, b.mul(source_step, I64(i))), f32x4.ir) for i in range(16)]
    while len(rows) > 2:
        rows = [joined(b, rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    for i in range(4):
        column = shuffle(b, rows[0], range(i, 64, 4), rows[1])
        write(b, b.add(target, b.mul(target_step, I64(i))), column)

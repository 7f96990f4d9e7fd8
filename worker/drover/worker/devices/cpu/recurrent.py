"""Operations that carry a state from token to token: convolution, scans, delta nets, linear attention.

What is independent is shared out over the threads (sequences, heads, stretches of a state's rows or columns), and each
of them walks the tokens in order, its part of the state in the result and in the nearest cache. Formulas:
docs/protocol.md section 6.7.
"""

from typing import Any

from numba import float32

from drover.worker.devices.cpu.products import loop, transpose, transpose_few
from drover.worker.devices.cpu.record import (
    DST,
    F32,
    NB0,
    NB1,
    NB2,
    NB3,
    NB4,
    NB5,
    NB6,
    NB_DST,
    NE0,
    NE1,
    NE2,
    NE3,
    NE4,
    NE_DST,
    PARAMS,
    SRC,
    SRC5,
    SRC6,
)
from drover.worker.devices.cpu.simd import F32 as FLOAT
from drover.worker.devices.cpu.simd import (
    I64,
    broadcast,
    constant,
    emits,
    f32,
    f32x16,
    fma,
    fused,
    i64,
    jit,
    jit_inline,
    load_f32,
    load_f32x16,
    load_i32,
    read,
    splat_f32x16,
    store,
    store_f32,
    sum_lanes,
    void,
    where_greater,
    write,
    zero_f32x16,
)
from drover.worker.devices.cpu.sync import each_item, portion, report_bad_index
from drover.worker.devices.cpu.vector import (
    exp,
    keep,
    log,
    move,
    param,
    row_address,
    store_row,
    word,
    write_some,
)

CHANNELS, TOKENS = 64, 48
"""Channels and tokens that SSM_CONV takes at a time."""
SCAN_ROWS = 16
"""Rows of states that SSM_SCAN takes at a time; heads among them, at most."""
MATRIX_ROWS = 32
"""Rows of a state that a delta net takes at a time."""

# What LINEAR_ATTENTION does (parameter 0); parameter 1 is what gated linear attention multiplies by.
WKV6, GATED = range(2)


# ---- SSM_CONV


def conv_scratch(taps: int) -> int:
    """Private bytes each thread needs for `ssm_conv`."""
    rows = (taps + 15) // 16 * 16
    return 4 * CHANNELS * (rows + TOKENS + rows + 16)


def ssm_conv(record: int, _thread: int, threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """dst(c, t, s) = Σ_j src0(t + j, c, s) · src1(j, c): channels side by side, first the taps, then the inputs."""
    channels, tokens, taps = word(record, NE_DST), word(record, NE_DST + 1), word(record, NE1)
    blocks, parts = (channels + CHANNELS - 1) // CHANNELS, (tokens + TOKENS - 1) // TOKENS
    items = blocks * parts * word(record, NE_DST + 2)
    inputs = scratch + 4 * CHANNELS * ((taps + 15) // 16 * 16)
    for item in each_item(record, items, portion(items, threads)):
        block, part, sequence = item % blocks, item // blocks % parts, item // (blocks * parts)
        first, start = CHANNELS * block, TOKENS * part
        end, count = min(CHANNELS, channels - first), min(TOKENS, tokens - start)
        for c in range(0, end, 16):
            w = row_address(record, SRC + 1, NB1, first + c, 0, 0)
            _turn(w, word(record, NB1 + 1), min(16, end - c), taps, scratch + 4 * c)
            x = row_address(record, SRC, NB0, first + c, sequence, 0) + 4 * start
            _turn(x, word(record, NB0 + 1), min(16, end - c), count + taps - 1, inputs + 4 * c)
        for t in range(count):
            y = row_address(record, DST, NB_DST, start + t, sequence, 0) + 4 * first
            for c in range(0, end, 16):
                total = zero_f32x16()
                for j in range(taps):
                    x = inputs + 4 * (CHANNELS * (t + j) + c)
                    total = fma(load_f32x16(x), load_f32x16(scratch + 4 * (CHANNELS * j + c)), total)
                store_row(y + 4 * c, F32, total, end - c)


@jit
def _turn(source: int, step: int, rows: int, columns: int, target: int) -> None:
    """Up to 16 rows `step` bytes apart as columns, among those of CHANNELS rows."""
    if rows == 16:
        for j in range(0, columns, 16):
            if columns - j > 4:
                transpose(source + 4 * j, step, target + 4 * CHANNELS * j, 4 * CHANNELS)
            else:
                transpose_few(source + 4 * j, step, target + 4 * CHANNELS * j, 4 * CHANNELS)
        return
    for row in range(rows):
        for j in range(columns):
            store_f32(target + 4 * (CHANNELS * j + row), load_f32(source + row * step + 4 * j))


# ---- SSM_SCAN


def ssm_scan(record: int, _thread: int, _threads: int, scratch: int, _shared: int, sync: int) -> None:
    """Operands: states, x, time steps, decay, B, C, the number of each sequence's state; parameter 0: states kept."""
    size, channels, heads = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2)
    rows, sequences, limit = channels * heads, word(record, NE1 + 3), word(record, NE0 + 3)
    blocks = (rows + SCAN_ROWS - 1) // SCAN_ROWS
    states = word(record, DST) + 4 * rows * word(record, NE1 + 2) * sequences
    for item in each_item(record, blocks * sequences, 1):
        first, sequence = item % blocks * SCAN_ROWS, item // blocks
        end = min(first + SCAN_ROWS, rows)
        chosen = load_i32(word(record, SRC6) + sequence * word(record, NB6))
        if chosen < 0 or chosen >= limit:
            report_bad_index(record, sync, chosen)
            continue
        for row in range(first, end):
            source = row_address(record, SRC, NB0, row % channels, row // channels, chosen)
            move(states + 4 * size * (sequence * rows + row), source, 4 * size)
        _scan_rows(record, first, end, sequence, states, scratch)


@jit
def _scan_rows(record: int, first: int, end: int, sequence: int, states: int, scratch: int) -> None:
    size, channels, heads = word(record, NE0), word(record, NE0 + 1), word(record, NE0 + 2)
    rows, tokens, kept = channels * heads, word(record, NE1 + 2), word(record, PARAMS)
    start = states + 4 * size * (sequence * rows + first)
    head, channel = first // channels, first % channels
    share = heads // word(record, NE4 + 1)
    for t in range(tokens):
        _time_steps(row_address(record, SRC + 2, NB2, t, sequence, 0) + 4 * head, scratch)
        state = start
        h, c = head, channel
        y = word(record, DST) + 4 * rows * (sequence * tokens + t)
        row = first
        while row < end:
            many = min(channels - c, end - row)
            step = load_f32(scratch + 4 * (h - head))
            b = row_address(record, SRC + 4, NB4, h // share, t, sequence)
            e = row_address(record, SRC5, NB5, h // share, t, sequence)
            x = row_address(record, SRC + 1, NB1, h, t, sequence) + c * word(record, NB1)
            decay = word(record, SRC + 3) + h * word(record, NB3 + 1)
            if word(record, NE3) == 1:
                rate = exp(splat_f32x16(step * load_f32(decay)))
                for i in range(many):
                    amount = splat_f32x16(step * load_f32(x + i * word(record, NB1)))
                    store_f32(y + 4 * (row + i), _scan_row(state, size, rate, amount, b, e))
                    state += 4 * size
            else:
                for i in range(many):
                    amount = splat_f32x16(step * load_f32(x + i * word(record, NB1)))
                    store_f32(y + 4 * (row + i), _scan_row_by_place(state, size, step, decay, amount, b, e))
                    state += 4 * size
            row += many
            h += 1
            c = 0
        back = tokens - 1 - t
        if 0 < back < kept:
            block = 4 * size * rows * word(record, NE1 + 3)
            move(start + back * block, start, 4 * size * (end - first))


@jit_inline
def _time_steps(source: int, target: int) -> None:
    """ln(1 + e^x) of the next 16 numbers."""
    x = load_f32x16(source)
    store(target, where_greater(x, splat_f32x16(20.0), x, log(splat_f32x16(1.0) + exp(x))))


@jit_inline
def _scan_row(state: int, size: int, rate: Any, amount: Any, b: int, e: int) -> Any:
    """state ← rate · state + amount · b; Σ state · e."""
    total = zero_f32x16()
    whole = size - size % 16
    for i in range(0, whole, 16):
        value = fma(load_f32x16(state + 4 * i), rate, amount * load_f32x16(b + 4 * i))
        store(state + 4 * i, value)
        total = fma(value, load_f32x16(e + 4 * i), total)
    if whole < size:
        value = fma(load_f32x16(state + 4 * whole), rate, amount * load_f32x16(b + 4 * whole))
        store_row(state + 4 * whole, F32, value, size - whole)
        total = total + keep(value * load_f32x16(e + 4 * whole), size - whole, 0.0)
    return sum_lanes(total)


@jit_inline
def _scan_row_by_place(state: int, size: int, step: float, decay: int, amount: Any, b: int, e: int) -> Any:
    """The same where every place of a row decays at a rate of its own."""
    total = zero_f32x16()
    for i in range(0, size, 16):
        rate = exp(splat_f32x16(step) * load_f32x16(decay + 4 * i))
        value = fma(load_f32x16(state + 4 * i), rate, amount * load_f32x16(b + 4 * i))
        store_row(state + 4 * i, F32, value, size - i)
        total = total + keep(value * load_f32x16(e + 4 * i), size - i, 0.0)
    return sum_lanes(total)


# ---- GATED_DELTA_NET and RWKV_WKV7: each row of the state's matrix goes its own way


def gated_delta_net(record: int, _thread: int, _threads: int, scratch: int, _shared: int, _sync: int) -> None:
    """Operands: q, k, v, gate, β, state; parameter 0: states kept."""
    size, heads, tokens, batch = word(record, NE2), word(record, NE2 + 1), word(record, NE2 + 2), word(record, NE2 + 3)
    blocks = (size + MATRIX_ROWS - 1) // MATRIX_ROWS
    outputs = 4 * size * heads * tokens * batch
    whole = 4 * size * size * heads * batch
    root = splat_f32x16(float32(1.0) / float32(size**0.5))
    for item in each_item(record, blocks * heads * batch, 1):
        block, head, stream = item % blocks, item // blocks % heads, item // (blocks * heads)
        first = block * MATRIX_ROWS
        rows = min(MATRIX_ROWS, size - first)
        place = 4 * size * ((stream * heads + head) * size + first)
        state = word(record, DST) + outputs + place
        move(state, word(record, SRC5) + place, 4 * size * rows)
        for t in range(tokens):
            _delta_token(record, head, stream, t, first, rows, state, scratch, root)
            back = tokens - 1 - t
            if 0 < back < word(record, PARAMS):
                move(state + back * whole, state, 4 * size * rows)


@jit_inline
def _delta_token(
    record: int, head: int, stream: int, t: int, first: int, rows: int, state: int, scratch: int, root: Any
) -> None:
    size, heads, tokens = word(record, NE2), word(record, NE2 + 1), word(record, NE2 + 2)
    source, shared = head % word(record, NE0 + 1), stream * word(record, NE0 + 3) // word(record, NE2 + 3)
    q = row_address(record, SRC, NB0, source, t, shared)
    k = row_address(record, SRC + 1, NB1, source, t, shared)
    v = row_address(record, SRC + 2, NB2, head, t, stream)
    gate = row_address(record, SRC + 3, NB3, head, t, stream)
    beta = load_f32(row_address(record, SRC + 4, NB4, head, t, stream))
    y = word(record, DST) + 4 * size * ((stream * tokens + t) * heads + head)
    decay, faded, scaled = scratch, scratch + 4 * size, scratch + 8 * size
    same = exp(splat_f32x16(load_f32(gate)))
    for i in range(0, size, 16):
        rate = same if word(record, NE3) == 1 else exp(load_f32x16(gate + 4 * i))
        store(decay + 4 * i, rate)
        store(faded + 4 * i, rate * load_f32x16(k + 4 * i))
        store(scaled + 4 * i, root * load_f32x16(q + 4 * i))
    for j in range(0, rows, 4):
        m0 = state + 4 * size * j
        m1, m2, m3 = m0 + 4 * size, m0 + 8 * size, m0 + 12 * size
        at = v + (first + j) * word(record, NB2)
        d0, d1, d2, d3 = _four_sums(m0, m1, m2, m3, faded, size)
        f0 = splat_f32x16(beta * (load_f32(at) - d0))
        f1 = splat_f32x16(beta * (load_f32(at + word(record, NB2)) - d1))
        f2 = splat_f32x16(beta * (load_f32(at + 2 * word(record, NB2)) - d2))
        f3 = splat_f32x16(beta * (load_f32(at + 3 * word(record, NB2)) - d3))
        s0, s1, s2, s3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        for i in range(0, 4 * size, 64):
            rate, key, query = load_f32x16(decay + i), load_f32x16(k + i), load_f32x16(scaled + i)
            x0, x1 = fma(load_f32x16(m0 + i), rate, f0 * key), fma(load_f32x16(m1 + i), rate, f1 * key)
            x2, x3 = fma(load_f32x16(m2 + i), rate, f2 * key), fma(load_f32x16(m3 + i), rate, f3 * key)
            store(m0 + i, x0)
            store(m1 + i, x1)
            store(m2 + i, x2)
            store(m3 + i, x3)
            s0, s1, s2, s3 = fma(x0, query, s0), fma(x1, query, s1), fma(x2, query, s2), fma(x3, query, s3)
        _store_four(y + 4 * (first + j), s0, s1, s2, s3)


@jit_inline
def _four_sums(m0: int, m1: int, m2: int, m3: int, x: int, size: int) -> Any:
    """The products of four rows with one."""
    d0, d1, d2, d3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, 4 * size, 64):
        a = load_f32x16(x + i)
        d0, d1 = fma(load_f32x16(m0 + i), a, d0), fma(load_f32x16(m1 + i), a, d1)
        d2, d3 = fma(load_f32x16(m2 + i), a, d2), fma(load_f32x16(m3 + i), a, d3)
    return sum_lanes(d0), sum_lanes(d1), sum_lanes(d2), sum_lanes(d3)


@jit_inline
def _store_four(place: int, s0: Any, s1: Any, s2: Any, s3: Any) -> None:
    store_f32(place, sum_lanes(s0))
    store_f32(place + 4, sum_lanes(s1))
    store_f32(place + 8, sum_lanes(s2))
    store_f32(place + 12, sum_lanes(s3))


def wkv7(record: int, _thread: int, _threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Operands: r, w, k, v, a, b, states; parameter 0: sequences."""
    size, heads, sequences = word(record, NE0), word(record, NE0 + 1), word(record, PARAMS)
    tokens = word(record, NE0 + 2) // sequences
    blocks = (size + MATRIX_ROWS - 1) // MATRIX_ROWS
    outputs = 4 * size * heads * tokens * sequences
    for item in each_item(record, blocks * heads * sequences, 1):
        block, head, sequence = item % blocks, item // blocks % heads, item // (blocks * heads)
        first = block * MATRIX_ROWS
        rows = min(MATRIX_ROWS, size - first)
        place = 4 * size * ((sequence * heads + head) * size + first)
        state = word(record, DST) + outputs + place
        move(state, word(record, SRC6) + place, 4 * size * rows)
        for t in range(sequence * tokens, (sequence + 1) * tokens):
            _wkv7_token(record, head, t, first, rows, state)


@jit_inline
def _wkv7_token(record: int, head: int, t: int, first: int, rows: int, state: int) -> None:
    size, heads = word(record, NE0), word(record, NE0 + 1)
    r, w = row_address(record, SRC, NB0, head, t, 0), row_address(record, SRC + 1, NB1, head, t, 0)
    k, v = row_address(record, SRC + 2, NB2, head, t, 0), row_address(record, SRC + 3, NB3, head, t, 0)
    a, b = row_address(record, SRC + 4, NB4, head, t, 0), row_address(record, SRC5, NB5, head, t, 0)
    y = word(record, DST) + 4 * size * (t * heads + head)
    for j in range(0, rows, 4):
        m0 = state + 4 * size * j
        m1, m2, m3 = m0 + 4 * size, m0 + 8 * size, m0 + 12 * size
        d0, d1, d2, d3 = _four_sums(m0, m1, m2, m3, a, size)
        f0, f1, f2, f3 = splat_f32x16(d0), splat_f32x16(d1), splat_f32x16(d2), splat_f32x16(d3)
        at = v + 4 * (first + j)
        v0, v1 = splat_f32x16(load_f32(at)), splat_f32x16(load_f32(at + 4))
        v2, v3 = splat_f32x16(load_f32(at + 8)), splat_f32x16(load_f32(at + 12))
        s0, s1, s2, s3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        for i in range(0, 4 * size, 64):
            rate, key, back, out = load_f32x16(w + i), load_f32x16(k + i), load_f32x16(b + i), load_f32x16(r + i)
            x0 = fma(load_f32x16(m0 + i), rate, fma(v0, key, f0 * back))
            x1 = fma(load_f32x16(m1 + i), rate, fma(v1, key, f1 * back))
            x2 = fma(load_f32x16(m2 + i), rate, fma(v2, key, f2 * back))
            x3 = fma(load_f32x16(m3 + i), rate, fma(v3, key, f3 * back))
            store(m0 + i, x0)
            store(m1 + i, x1)
            store(m2 + i, x2)
            store(m3 + i, x3)
            s0, s1, s2, s3 = fma(x0, out, s0), fma(x1, out, s1), fma(x2, out, s2), fma(x3, out, s3)
        _store_four(y + 4 * (first + j), s0, s1, s2, s3)


# ---- RWKV_WKV6 and GATED_LINEAR_ATTN: each column of the state's matrix goes its own way


def linear_attention(record: int, _thread: int, _threads: int, _scratch: int, _shared: int, _sync: int) -> None:
    """Operands: k, v, r, bonus, w, states; or k, v, q, gate, states. Parameter 2: sequences."""
    size, heads, sequences = word(record, NE0), word(record, NE0 + 1), word(record, PARAMS + 2)
    tokens = word(record, NE0 + 2) // sequences
    width = 64 if size % 64 == 0 else 16
    blocks = (size + width - 1) // width
    outputs = 4 * size * heads * tokens * sequences
    states = word(record, SRC5) if word(record, PARAMS) == WKV6 else word(record, SRC + 4)
    for item in each_item(record, blocks * heads * sequences, 1):
        column, head, sequence = item % blocks * width, item // blocks % heads, item // (blocks * heads)
        place = 4 * (size * size * (sequence * heads + head) + column)
        state = word(record, DST) + outputs + place
        for i in range(size):
            move(state + 4 * size * i, states + place + 4 * size * i, 4 * min(width, size - column))
        for t in range(sequence * tokens, (sequence + 1) * tokens):
            _linear_token(record, head, t, column, width, state)


@jit
def _linear_token(record: int, head: int, t: int, column: int, width: int, state: int) -> None:
    size = word(record, NE0)
    k, r = row_address(record, SRC, NB0, head, t, 0), row_address(record, SRC + 2, NB2, head, t, 0)
    v = row_address(record, SRC + 1, NB1, head, t, 0) + 4 * column
    y = word(record, DST) + 4 * (size * (t * word(record, NE0 + 1) + head) + column)
    left = size - column
    if word(record, PARAMS) == WKV6:
        w = row_address(record, SRC + 4, NB4, head, t, 0)
        seen = _seen(k, r, word(record, SRC + 3) + 4 * size * head, size)
        if width == 64:
            remember64(state, size, k, v, w, r, y, seen, left)
        else:
            remember16(state, size, k, v, w, r, y, seen, left)
    else:
        w = row_address(record, SRC + 3, NB3, head, t, 0)
        if width == 64:
            blend64(state, size, k, v, w, r, y, param(record, 1), left)
        else:
            blend16(state, size, k, v, w, r, y, param(record, 1), left)


@jit_inline
def _seen(k: int, r: int, bonus: int, size: int) -> Any:
    """How much of a token's own value it gets to see: Σ r · bonus · k."""
    total = zero_f32x16()
    for i in range(0, size, 16):
        product = load_f32x16(k + 4 * i) * load_f32x16(bonus + 4 * i) * load_f32x16(r + 4 * i)
        total = total + keep(product, size - i, 0.0)
    return sum_lanes(total)


def _columns(kind: int, vectors: int) -> Any:
    """An instruction that takes 16 · `vectors` columns of a state one token further, and sums up what the token sees.

    For WKV6 `factor` is how much of its own value it sees beside the state before it; otherwise it sees the state
    after it, times `factor`. Of the last 16 columns `left` are stored where there are fewer.
    """

    def columns(b: Any, state: Any, size: Any, k: Any, v: Any, w: Any, r: Any, y: Any, factor: Any, left: Any) -> None:
        values = [read(b, b.add(v, I64(64 * n)), f32x16.ir) for n in range(vectors)]
        factors = broadcast(b, factor, 16)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            key, rate, taken = (broadcast(b, read(b, b.add(x, b.shl(i, I64(2))), FLOAT), 16) for x in (k, w, r))
            row = b.add(state, b.mul(i, b.shl(size, I64(2))))
            totals = []
            for n in range(vectors):
                place = b.add(row, I64(64 * n))
                before = read(b, place, f32x16.ir)
                after = fused(b, rate, before, b.fmul(key, values[n]))
                _write(b, place, after, left, vectors)
                totals.append(fused(b, taken, before if kind == WKV6 else after, sums[n]))
            return totals

        for n, total in enumerate(loop(b, size, [constant(f32x16, 0.0)] * vectors, body)):
            result = fused(b, factors, values[n], total) if kind == WKV6 else b.fmul(total, factors)
            _write(b, b.add(y, I64(64 * n)), result, left, vectors)

    columns.__name__ = f"columns{kind}x{vectors}"
    return emits(void, *[i64] * 7, f32, i64)(columns)


def _write(b: Any, place: Any, value: Any, left: Any, vectors: int) -> None:
    if vectors > 1:
        write(b, place, value)
    else:
        write_some(b, place, value, left)


remember64, remember16, blend64, blend16 = (_columns(kind, vectors) for kind in (WKV6, GATED) for vectors in (4, 1))

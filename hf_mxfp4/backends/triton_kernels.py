"""Triton kernels of packed experts. Nothing here is checked, allocated or chosen: `triton.py` beside it does that.

E experts, N output features (rows of weights), K input features, T tokens, k experts a token, S = T * k slots; slot
t * k + j is token t's j-th choice. How weights and activations are held is told in `triton_decode.py`.

Tiles. Slots are sorted by expert and cut into tiles of BLOCK_TOKENS, none with two experts. `table` int32 [3, M] holds
each tile's expert (-1 for none), its first sorted position, and the position after the expert's last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_decode import (
    add_product,
    apply_gate,
    as_float,
    as_operand,
    cast_like,
    first_float,
    held_at,
    load_inside,
    plane_pairs,
    plane_weights,
    scale_factors,
    second_float,
    side_by_side,
    spread_groups,
    store_parts,
)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter, on tensors of any device, instead of being compiled."""

_HALF_OF_126 = tl.constexpr(9.223372036854775808e18)  # 2^63


@triton.jit
def _sums(
    x,
    x_rows,
    part_stride,
    words,
    scales,
    rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    NARROW: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of one expert's weights times rows of activations: float32 [BLOCK_ROWS, BLOCK_TOKENS].

    x: bfloat16 (int16 where interpreted, so below too), where activations begin; x_rows: int64 [BLOCK_TOKENS];
    part_stride: from one part to the next.
    words: int32 for planes, uint8 otherwise, the expert's [N, K]; scales: uint8, the expert's [N, K / 32].
    rows: int32 [BLOCK_ROWS], of weights.
    """
    whole: tl.constexpr = K % BLOCK_K == 0
    groups = tl.arange(0, BLOCK_K // 32)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    scales_at = scales + rows[:, None] * (K // 32) + groups[None, :]
    if PLANES:
        word = tl.arange(0, BLOCK_K // 8)
        element = tl.arange(0, BLOCK_K // 4)
        words_at = words + rows[:, None] * (K // 8) + word[None, :]
        x_at = x + x_rows[None, :] * K + element[:, None]
        for k in range(0, K, BLOCK_K):
            codes = load_inside(words_at, (word < K // 8 - k // 8)[None, :], whole)
            bytes = load_inside(scales_at, (groups < K // 32 - k // 32)[None, :], whole)
            factor, power = scale_factors(bytes, NARROW)
            factor = spread_groups(factor, BLOCK_K)
            power = spread_groups(power, BLOCK_K)
            for plane in tl.static_range(4):
                weights = plane_weights(codes, factor, power, plane, NARROW, MULTIPLY)
                for part in tl.static_range(PARTS):
                    at = x_at + part * part_stride + plane * (K // 4)
                    bits = load_inside(at, (element < K // 4 - k // 4)[:, None], whole)
                    sums = add_product(weights, as_operand(bits, MULTIPLY), sums, part, NARROW)
            words_at += BLOCK_K // 8
            scales_at += BLOCK_K // 32
            x_at += BLOCK_K // 4
    else:
        byte = tl.arange(0, BLOCK_K // 2)
        column = tl.arange(0, BLOCK_K)
        words_at = words + rows[:, None] * (K // 2) + byte[None, :]
        x_at = x + x_rows[None, :] * K + column[:, None]
        for k in range(0, K, BLOCK_K):
            codes = load_inside(words_at, (byte < K // 2 - k // 2)[None, :], whole)
            bytes = load_inside(scales_at, (groups < K // 32 - k // 32)[None, :], whole)
            for part in tl.static_range(PARTS):
                bits = load_inside(x_at + part * part_stride, (column < K - k)[:, None], whole)
                if MULTIPLY == "interpreted":
                    bits = bits.to(tl.bfloat16, bitcast=True)
                sums = tl.dot_scaled(codes, bytes, "e2m1", bits, None, "bf16", sums)
            words_at += BLOCK_K // 2
            scales_at += BLOCK_K // 32
            x_at += BLOCK_K
    return sums


@triton.jit
def _first_rows(tile, N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Rows of the first projection that a tile computes: eight gates, the eight ups of the same outputs, and so on.

    Both of a pair are then in one thread. A row past the end is a row before it; nothing of it is stored.
    """
    row = tl.arange(0, BLOCK_ROWS)
    if GATED:
        out = tile * (BLOCK_ROWS // 2) + row // 16 * 8 + row % 8
        out = tl.minimum(out, N // 2 - 1)
        if INTERLEAVED:
            rows = 2 * out + row // 8 % 2
        else:
            rows = out + row // 8 % 2 * (N // 2)
    else:
        rows = tl.minimum(tile * BLOCK_ROWS + row, N - 1)
    return rows


@triton.jit
def _tile(table, tiles, tile, BLOCK_TOKENS: tl.constexpr):
    """A tile's expert (-1 for none), its sorted positions, and which of them it has."""
    expert = tl.load(table + tile)
    at = tl.load(table + tiles + tile) + tl.arange(0, BLOCK_TOKENS)
    return expert, at, at < tl.load(table + 2 * tiles + tile)


@triton.jit(do_not_specialize=["tiles", "slots", "tokens"])
def first_projection(
    x,
    words,
    scales,
    bias,
    order,
    table,
    out,
    tiles,
    slots,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_MAX: tl.constexpr,
    ACT_MAX: tl.constexpr,
    UP_MAX: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    UP_ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    NARROW: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The first projection and the activation: out[part, slot] = parts of act(W x[slot / k] + bias), places permuted.

    x: bfloat16 [PARTS, T, K]; words: [E, N, K]; scales: uint8 [E, N, K / 32]; bias: [E, N] or None.
    order: int32 [S], the slot at each sorted position; out: int16 [PARTS, S, I].
    """
    ROW_TILES: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
    MIDDLE: tl.constexpr = N // 2 if GATED else N
    BLOCK_OUT: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    row_tile = tl.program_id(0) % ROW_TILES
    expert, at, alive = _tile(table, tiles, tl.program_id(0) // ROW_TILES, BLOCK_TOKENS)
    if expert >= 0:
        slot = tl.load(order + at, mask=alive, other=0).to(tl.int64)
        rows = _first_rows(row_tile, N, GATED, INTERLEAVED, BLOCK_ROWS)
        sums = _sums(
            x,
            slot // TOP_K,
            tokens.to(tl.int64) * K,
            words + expert.to(tl.int64) * (N * (K // (8 if PLANES else 2))),
            scales + expert.to(tl.int64) * (N * (K // 32)),
            rows,
            K,
            PARTS,
            PLANES,
            NARROW,
            MULTIPLY,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            BLOCK_K,
        )
        if bias is not None:
            sums += as_float(tl.load(bias + expert.to(tl.int64) * N + rows))[:, None]
        value = apply_gate(sums, GATED, KIND, ALPHA, GATE_MAX, ACT_MAX, UP_MAX, GATE_CAP, UP_CAP, UP_ADD)
        column = row_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        pointers = out + slot[None, :] * MIDDLE + held_at(column, MIDDLE, PLANES)[:, None]
        mask = alive[None, :] & (column < MIDDLE)[:, None]
        store_parts(pointers, value, mask, slots.to(tl.int64) * MIDDLE, PARTS)


@triton.jit(do_not_specialize=["tiles", "slots"])
def second_projection(
    x,
    words,
    scales,
    bias,
    order,
    table,
    weights,
    out,
    tiles,
    slots,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    NARROW: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A projection alone: out[slot] = (W x[slot] + bias) * weights[slot].

    x: bfloat16 [PARTS, S, K]; order: int32 [S], or None where slots are sorted already; weights: [S] or None;
    out: float32 [S, N].
    """
    ROW_TILES: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
    row_tile = tl.program_id(0) % ROW_TILES
    expert, at, alive = _tile(table, tiles, tl.program_id(0) // ROW_TILES, BLOCK_TOKENS)
    if expert >= 0:
        if order is None:
            slot = tl.where(alive, at, 0).to(tl.int64)
        else:
            slot = tl.load(order + at, mask=alive, other=0).to(tl.int64)
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = tl.minimum(row, N - 1)
        sums = _sums(
            x,
            slot,
            slots.to(tl.int64) * K,
            words + expert.to(tl.int64) * (N * (K // (8 if PLANES else 2))),
            scales + expert.to(tl.int64) * (N * (K // 32)),
            rows,
            K,
            PARTS,
            PLANES,
            NARROW,
            MULTIPLY,
            BLOCK_ROWS,
            BLOCK_TOKENS,
            BLOCK_K,
        )
        if bias is not None:
            sums += as_float(tl.load(bias + expert.to(tl.int64) * N + rows))[:, None]
        if weights is not None:
            sums *= as_float(tl.load(weights + slot, mask=alive, other=0))[None, :]
        tl.store(out + slot[None, :] * N + row[:, None], sums, mask=alive[None, :] & (row < N)[:, None])


@triton.jit(do_not_specialize=["tiles", "slots"])
def transposed_projection(
    x,
    words,
    scales,
    table,
    out,
    tiles,
    slots,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A projection turned round, as a gradient goes: out[slot] = W^T x[slot], slots sorted.

    x: bfloat16 [PARTS, S, N], columns in their own order; out: float32 [S, K]. BLOCK_ROWS of N are summed at a time.
    """
    COLUMN_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    HALF: tl.constexpr = BLOCK_K // 4
    column_tile = tl.program_id(0) % COLUMN_TILES
    expert, at, alive = _tile(table, tiles, tl.program_id(0) // COLUMN_TILES, BLOCK_TOKENS)
    if expert >= 0:
        slot = tl.where(alive, at, 0).to(tl.int64)
        word = column_tile * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
        group = column_tile * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
        row = tl.arange(0, BLOCK_ROWS)
        words_at = words + expert.to(tl.int64) * (N * (K // 8)) + row[:, None] * (K // 8)
        words_at += tl.minimum(word, K // 8 - 1)[None, :]
        scales_at = scales + expert.to(tl.int64) * (N * (K // 32)) + row[:, None] * (K // 32)
        scales_at += tl.minimum(group, K // 32 - 1)[None, :]
        x_at = x + slot[None, :] * N + row[:, None]
        stride = slots.to(tl.int64) * N
        sums_0 = tl.zeros((HALF, BLOCK_TOKENS), dtype=tl.float32)
        sums_1 = tl.zeros((HALF, BLOCK_TOKENS), dtype=tl.float32)
        sums_2 = tl.zeros((HALF, BLOCK_TOKENS), dtype=tl.float32)
        sums_3 = tl.zeros((HALF, BLOCK_TOKENS), dtype=tl.float32)
        for n in range(0, N, BLOCK_ROWS):
            inside = (row < N - n)[:, None]
            codes = tl.load(words_at, mask=inside, other=0)
            factor, power = scale_factors(tl.load(scales_at, mask=inside, other=0), NARROW)
            factor = spread_groups(factor, BLOCK_K)
            power = spread_groups(power, BLOCK_K)
            weights_0 = tl.trans(plane_weights(codes, factor, power, 0, NARROW, MULTIPLY))
            weights_1 = tl.trans(plane_weights(codes, factor, power, 1, NARROW, MULTIPLY))
            weights_2 = tl.trans(plane_weights(codes, factor, power, 2, NARROW, MULTIPLY))
            weights_3 = tl.trans(plane_weights(codes, factor, power, 3, NARROW, MULTIPLY))
            for part in tl.static_range(PARTS):
                operand = as_operand(tl.load(x_at + part * stride, mask=inside, other=0), MULTIPLY)
                sums_0 = add_product(weights_0, operand, sums_0, part, NARROW)
                sums_1 = add_product(weights_1, operand, sums_1, part, NARROW)
                sums_2 = add_product(weights_2, operand, sums_2, part, NARROW)
                sums_3 = add_product(weights_3, operand, sums_3, part, NARROW)
            words_at += BLOCK_ROWS * (K // 8)
            scales_at += BLOCK_ROWS * (K // 32)
            x_at += BLOCK_ROWS
        element = tl.arange(0, HALF)
        column = column_tile * BLOCK_K + element // 2 * 8 + element % 2 * 4
        mask = alive[None, :] & (column < K)[:, None]
        pointers = out + slot[None, :] * K + column[:, None]
        tl.store(pointers, sums_0, mask=mask)
        tl.store(pointers + 1, sums_1, mask=mask)
        tl.store(pointers + 2, sums_2, mask=mask)
        tl.store(pointers + 3, sums_3, mask=mask)


@triton.jit
def _row_sums(
    x,
    part_stride,
    words,
    scales,
    rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of one expert's weights times one row of activations, without a matrix instruction: float32 [BLOCK_ROWS].

    Half of the 2^126 that weights lack comes with the activations, half with the sum over their group, so that no
    multiplication is spent on it for each weight: an activation of 2^64 or more is infinite, one below 2^-86 is 0.
    """
    whole: tl.constexpr = K % BLOCK_K == 0
    word = tl.arange(0, BLOCK_K // 8)
    group = tl.arange(0, BLOCK_K // 32)
    element = tl.arange(0, BLOCK_K // 4)
    words_at = words + rows[:, None] * (K // 8) + word[None, :]
    scales_at = scales + rows[:, None] * (K // 32) + group[None, :]
    x_at = x + element
    sums = tl.zeros((BLOCK_ROWS, BLOCK_K // 4), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        codes = load_inside(words_at, (word < K // 8 - k // 8)[None, :], whole)
        byte = load_inside(scales_at, (group < K // 32 - k // 32)[None, :], whole).to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        power = spread_groups(bits, BLOCK_K).to(tl.float32, bitcast=True)
        inner = tl.zeros((BLOCK_ROWS, BLOCK_K // 4), dtype=tl.float32)
        for plane in tl.static_range(4):
            pairs = plane_pairs(codes, plane)
            weights = side_by_side(first_float(pairs), second_float(pairs))
            value = tl.zeros((BLOCK_K // 4,), dtype=tl.float32)
            for part in tl.static_range(PARTS):
                at = x_at + part * part_stride + plane * (K // 4)
                value += as_float(load_inside(at, element < K // 4 - k // 4, whole))
            inner += weights * (value * _HALF_OF_126)[None, :]
        sums += inner * _HALF_OF_126 * side_by_side(power, power)
        words_at += BLOCK_K // 8
        scales_at += BLOCK_K // 32
        x_at += BLOCK_K // 4
    return tl.sum(sums, axis=1)


@triton.jit(do_not_specialize=["slots", "tokens"])
def first_rows(
    x,
    words,
    scales,
    bias,
    ids,
    out,
    slots,
    tokens,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_MAX: tl.constexpr,
    ACT_MAX: tl.constexpr,
    UP_MAX: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    UP_ADD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `first_projection`, each slot by itself and in float32. ids: integer [S]."""
    ROW_TILES: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
    MIDDLE: tl.constexpr = N // 2 if GATED else N
    BLOCK_OUT: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    row_tile = tl.program_id(0) % ROW_TILES
    slot = (tl.program_id(0) // ROW_TILES).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if (expert >= 0) & (expert < E):
        rows = _first_rows(row_tile, N, GATED, INTERLEAVED, BLOCK_ROWS)
        sums = _row_sums(
            x + slot // TOP_K * K,
            tokens.to(tl.int64) * K,
            words + expert * (N * (K // 8)),
            scales + expert * (N * (K // 32)),
            rows,
            K,
            PARTS,
            BLOCK_ROWS,
            BLOCK_K,
        )
        if bias is not None:
            sums += as_float(tl.load(bias + expert * N + rows))
        value = apply_gate(sums[:, None], GATED, KIND, ALPHA, GATE_MAX, ACT_MAX, UP_MAX, GATE_CAP, UP_CAP, UP_ADD)
        column = row_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        pointers = out + slot * MIDDLE + held_at(column, MIDDLE, True)[:, None]
        store_parts(pointers, value, (column < MIDDLE)[:, None], slots.to(tl.int64) * MIDDLE, PARTS)


@triton.jit(do_not_specialize=["slots"])
def second_rows(
    x,
    words,
    scales,
    bias,
    ids,
    weights,
    out,
    slots,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `second_projection`, each slot by itself and in float32. ids: integer [S]."""
    ROW_TILES: tl.constexpr = (N + BLOCK_ROWS - 1) // BLOCK_ROWS
    row_tile = tl.program_id(0) % ROW_TILES
    slot = (tl.program_id(0) // ROW_TILES).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if (expert >= 0) & (expert < E):
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = tl.minimum(row, N - 1)
        sums = _row_sums(
            x + slot * K,
            slots.to(tl.int64) * K,
            words + expert * (N * (K // 8)),
            scales + expert * (N * (K // 32)),
            rows,
            K,
            PARTS,
            BLOCK_ROWS,
            BLOCK_K,
        )
        if bias is not None:
            sums += as_float(tl.load(bias + expert * N + rows))
        tl.store(out + slot * N + row, sums * as_float(tl.load(weights + slot)), mask=row < N)


@triton.jit
def _write_tiles(table, tiles, expert, start, stop, before, BLOCK_TOKENS: tl.constexpr):
    """Enters an expert's tiles into the table, `before` of which are other experts'."""
    index = tl.arange(0, 64)
    begin = 0
    count = (stop - start + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    while begin < count:
        tile = begin + index
        mine = tile < count
        tl.store(table + before + tile, tl.zeros((64,), tl.int32) + expert, mask=mine)
        tl.store(table + tiles + before + tile, start + tile * BLOCK_TOKENS, mask=mine)
        tl.store(table + 2 * tiles + before + tile, tl.zeros((64,), tl.int32) + stop, mask=mine)
        begin += 64


@triton.jit
def _clear_tiles(table, tiles, used):
    """Makes the table's tiles from `used` on nobody's."""
    index = tl.arange(0, 64)
    begin = used
    while begin < tiles:
        tl.store(table + begin + index, tl.full((64,), -1, tl.int32), mask=begin + index < tiles)
        begin += 64


@triton.jit
def _permute(x, out, tokens, item, K: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a block of one row of activations in parts and in its places."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    column = item % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    start = (item // BLOCKS).to(tl.int64) * K
    value = as_float(tl.load(x + start + column, mask=column < K, other=0))
    pointers = out + start + held_at(column, K, PLANES)
    store_parts(pointers, value, column < K, tokens.to(tl.int64) * K, PARTS)


@triton.jit(do_not_specialize=["tokens"])
def permute(x, out, tokens, K: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Activations [T, K] as parts int16 [PARTS, T, K], columns in their places."""
    _permute(x, out, tokens, tl.program_id(0), K, PARTS, PLANES, BLOCK)


@triton.jit(do_not_specialize=["tiles", "slots", "tokens"])
def route(
    x,
    ids,
    out,
    order,
    table,
    tiles,
    slots,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Sorts slots by expert and cuts tiles, one program an expert; further programs do the work of `permute`.

    ids: integer [S], those outside 0 to E - 1 are nobody's; order: int32 [S]; table: int32 [3, tiles]. Each expert's
    program counts all slots, then writes its own in their order, so that nothing depends on which program is first.
    """
    expert = tl.program_id(0)
    if expert >= E:
        _permute(x, out, tokens, expert - E, K, PARTS, PLANES, BLOCK)
    else:
        index = tl.arange(0, CHUNK)
        bins = tl.arange(0, BINS)
        counts = tl.zeros((BINS,), dtype=tl.int32)
        begin = 0
        while begin < slots:
            id = tl.load(ids + begin + index, mask=begin + index < slots, other=-1)
            known = (id >= 0) & (id < E)
            counts += tl.histogram(tl.where(known, id, BINS - 1).to(tl.int32), BINS)
            begin += CHUNK
        counts = tl.where(bins < E, counts, 0)
        needed = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        start = tl.sum(tl.where(bins < expert, counts, 0))
        stop = start + tl.sum(tl.where(bins == expert, counts, 0))
        before = tl.sum(tl.where(bins < expert, needed, 0))
        _write_tiles(table, tiles, expert, start, stop, before, BLOCK_TOKENS)
        if expert == 0:
            _clear_tiles(table, tiles, tl.sum(needed))
        at = start
        begin = 0
        while begin < slots:
            id = tl.load(ids + begin + index, mask=begin + index < slots, other=-1)
            mine = (id == expert).to(tl.int32)
            place = at + tl.cumsum(mine, axis=0) - mine
            tl.store(order + place, begin + index, mask=mine == 1)
            at += tl.sum(mine)
            begin += CHUNK


@triton.jit(do_not_specialize=["tiles"])
def cut_tiles(offsets, table, tiles, E: tl.constexpr, BINS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The table for slots that are sorted already, one program an expert. offsets: int64 [E + 1]."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    starts = tl.load(offsets + bins, mask=bins < E, other=0)
    stops = tl.load(offsets + bins + 1, mask=bins < E, other=0)
    needed = ((stops - starts + BLOCK_TOKENS - 1) // BLOCK_TOKENS).to(tl.int32)
    before = tl.sum(tl.where(bins < expert, needed, 0))
    start = tl.load(offsets + expert).to(tl.int32)
    stop = tl.load(offsets + expert + 1).to(tl.int32)
    _write_tiles(table, tiles, expert, start, stop, before, BLOCK_TOKENS)
    if expert == 0:
        _clear_tiles(table, tiles, tl.sum(needed))


@triton.jit
def mix(partial, ids, out, E: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over j of partial[t * k + j], in that order, of slots that are an expert's.

    partial: float32 [S, N]; ids: integer [S]; out: [T, N], bfloat16 as int16.
    """
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        id = tl.load(ids + token * TOP_K + j)
        if (id >= 0) & (id < E):
            sums += tl.load(partial + (token * TOP_K + j) * N + column, mask=column < N, other=0.0)
    tl.store(out + token * N + column, cast_like(sums, out), mask=column < N)

"""Triton kernels of packed experts. Nothing here is checked, allocated or chosen: `triton.py` beside it does that.

E experts, N output features (rows of weights), K input features, T tokens, k experts a token, S = T * k slots; slot
t * k + j is token t's j-th choice. A word is the 32 bits of eight neighbouring weights of a row, code i at bit 4 i.

Four planes. Shifted left by 12 - 4 j, a word has the codes j and j + 4 at the upper ends of its two halves: two shifts,
two logical operations and one multiplication make two bfloat16 weights of it that already stand side by side. So the
columns of activations, not the bytes of weights, are put into another order: plane j of four holds, word by word, the
columns 8 w + j and 8 w + j + 4. Weights stand on the left of every product.

Parts. Activations are held as bfloat16 bits, in as many parts as it takes for their sum to be what was given: one for
bfloat16, two for float16 (8 + 3 bits), three for float32 (8 + 8 + 8). A weight is a bfloat16 in any case, products
are exact in float32, and a weight that is decoded is multiplied by all parts.

Tiles. Slots are sorted by expert and cut into tiles of BLOCK_TOKENS, none with two experts. `table` int32 [3, M] holds
each tile's expert (-1 for none), its first sorted position, and the position after the expert's last.

MULTIPLY says how two bfloat16 are multiplied, and is all that differs between interpreted and compiled code: "ptx",
an instruction of NVIDIA's; "float32", for other GPUs; "interpreted", which leaves both factors in float32, because
Triton's interpreter computes bfloat16 as the integers of its bits. In each the product is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter, on tensors of any device, instead of being compiled."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_SIGNS = tl.constexpr(-0x7FFF8000)  # the signs of two bfloat16, as int32
_MAGNITUDES = tl.constexpr(0x01C001C0)  # where the three bits of a code become two bits of exponent and one of fraction
_INFINITY = tl.constexpr(0x7F800000)
_HALF_OF_126 = tl.constexpr(9.223372036854775808e18)  # 2^63
_UNLIMITED = tl.constexpr(float("inf"))


@triton.jit
def _float(bits_or_value):
    """float32 of float16 or float32 values, or of bfloat16 bits in int16."""
    if bits_or_value.dtype == tl.int16:
        value = (bits_or_value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = bits_or_value.to(tl.float32)
    return value


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    """What is there, 0 where it is not inside. WHOLE: all is."""
    if WHOLE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=inside, other=0)
    return value


@triton.jit
def _round(value):
    """Bits of the bfloat16 nearest to a float32, ties to even, as int16. The interpreter's own cast truncates."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _cast(value, like):
    """A float32 as what is stored where `like` points: float32, float16 or bfloat16 bits."""
    if like.dtype.element_ty == tl.int16:
        cast = _round(value)
    else:
        cast = value.to(like.dtype.element_ty)
    return cast


@triton.jit
def _store_parts(pointers, value, mask, stride, PARTS: tl.constexpr):
    """Stores a float32 as bfloat16 parts, `stride` elements apart; what is not finite is the first part alone."""
    for part in tl.static_range(PARTS):
        if part == PARTS - 1:
            bits = _round(value)
        else:
            whole = value.to(tl.int32, bitcast=True)
            finite = (whole & _INFINITY) != _INFINITY
            bits = tl.where(value != value, 0x7FC0, whole >> 16).to(tl.int16)
            value = tl.where(finite, value - _float(bits), 0.0)
        tl.store(pointers + part * stride, bits, mask=mask)


@triton.jit
def _place(column, K: tl.constexpr, PLANES: tl.constexpr):
    """Where a column of activations is held."""
    place = column
    if PLANES:
        place = (column % 4) * (K // 4) + column // 8 * 2 + column // 4 % 2
    return place


@triton.jit
def _pairs(words, plane: tl.constexpr):
    """Bits of two bfloat16 in each int32: the weights of a plane times 2^-126, the smallest a subnormal."""
    if plane == 0:
        shifted = words << 6
    elif plane == 1:
        shifted = words << 2
    elif plane == 2:
        shifted = words >> 2
    else:
        shifted = words >> 6
    return ((words << (12 - 4 * plane)) & _SIGNS) | (shifted & _MAGNITUDES)


@triton.jit
def _twice(pairs, factor):
    """Two bfloat16 products in each int32, by NVIDIA's instruction, which keeps subnormals; -0 is added."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [pairs, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _first_float(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _second_float(pairs):
    return (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(pairs, factor, MULTIPLY: tl.constexpr):
    """Multiplies two bfloat16 in each int32 by the two in `factor`, both the same."""
    if MULTIPLY == "ptx":
        product = _twice(pairs, factor)
    else:
        wide = _second_float(factor)
        first = (_first_float(pairs) * wide).to(tl.int32, bitcast=True)
        second = (_second_float(pairs) * wide).to(tl.int32, bitcast=True)
        product = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    return product


@triton.jit
def _side_by_side(first, second):
    """[R, W] and [R, W] to [R, 2 W], elements taking turns."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _plane(words, factor, power, plane: tl.constexpr, NARROW: tl.constexpr, MULTIPLY: tl.constexpr):
    """The weights of a plane, [R, 2 W]: bfloat16, or float32 where interpreted."""
    product = _multiply(_pairs(words, plane), factor, MULTIPLY)
    if not NARROW:
        product = _multiply(product, power, MULTIPLY)
    if MULTIPLY == "interpreted":
        weights = _side_by_side(_first_float(product), _second_float(product))
    else:
        halves = _side_by_side(product.to(tl.int16), (product >> 16).to(tl.int16))
        weights = halves.to(tl.bfloat16, bitcast=True)
    return weights


@triton.jit
def _times(weights, operand, sums, part: tl.constexpr, NARROW: tl.constexpr):
    """Adds a product with one part of activations; infinite weights, of scales above 2^125, are for the first alone."""
    if part > 0 and not NARROW:
        weights = tl.where((weights < float("inf")) & (weights > float("-inf")), weights, 0.0)
    return tl.dot(weights, operand, sums)


@triton.jit
def _both(bits):
    """bfloat16 bits in both halves of an int32."""
    return bits | (bits << 16)


@triton.jit
def _factors(scales, NARROW: tl.constexpr):
    """What the weights of `_pairs` are multiplied by, and then by: 2^126 times the scale, if that is a bfloat16."""
    byte = scales.to(tl.int32)
    if NARROW:
        factor = _both((byte + 126) << 7)
        power = factor
    else:
        factor = tl.full(byte.shape, 0x7E807E80, tl.int32)
        power = _both(tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7)))
    return factor, power


@triton.jit
def _spread(groups, BLOCK_K: tl.constexpr):
    """[R, BLOCK_K / 32] to [R, BLOCK_K / 8]: what a group of 32 weights has, for each of its four words."""
    rows: tl.constexpr = groups.shape[0]
    spread = tl.broadcast_to(groups[:, :, None], (rows, BLOCK_K // 32, 4))
    return tl.reshape(spread, (rows, BLOCK_K // 8))


@triton.jit
def _operand(values, MULTIPLY: tl.constexpr):
    """Activations as what a product takes: bfloat16 as they were loaded, or float32 of bits where interpreted."""
    if MULTIPLY == "interpreted":
        values = _float(values)
    return values


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
            codes = _load(words_at, (word < K // 8 - k // 8)[None, :], whole)
            bytes = _load(scales_at, (groups < K // 32 - k // 32)[None, :], whole)
            factor, power = _factors(bytes, NARROW)
            factor = _spread(factor, BLOCK_K)
            power = _spread(power, BLOCK_K)
            for plane in tl.static_range(4):
                weights = _plane(codes, factor, power, plane, NARROW, MULTIPLY)
                for part in tl.static_range(PARTS):
                    at = x_at + part * part_stride + plane * (K // 4)
                    bits = _load(at, (element < K // 4 - k // 4)[:, None], whole)
                    sums = _times(weights, _operand(bits, MULTIPLY), sums, part, NARROW)
            words_at += BLOCK_K // 8
            scales_at += BLOCK_K // 32
            x_at += BLOCK_K // 4
    else:
        byte = tl.arange(0, BLOCK_K // 2)
        column = tl.arange(0, BLOCK_K)
        words_at = words + rows[:, None] * (K // 2) + byte[None, :]
        x_at = x + x_rows[None, :] * K + column[:, None]
        for k in range(0, K, BLOCK_K):
            codes = _load(words_at, (byte < K // 2 - k // 2)[None, :], whole)
            bytes = _load(scales_at, (groups < K // 32 - k // 32)[None, :], whole)
            for part in tl.static_range(PARTS):
                bits = _load(x_at + part * part_stride, (column < K - k)[:, None], whole)
                if MULTIPLY == "interpreted":
                    bits = bits.to(tl.bfloat16, bitcast=True)
                sums = tl.dot_scaled(codes, bytes, "e2m1", bits, None, "bf16", sums)
            words_at += BLOCK_K // 2
            scales_at += BLOCK_K // 32
            x_at += BLOCK_K
    return sums


@triton.jit
def _tanh(z):
    """By its series near 0, where the quotient of exponentials cancels."""
    square = z * z
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    decay = tl.exp2(tl.abs(z) * (-2 * _LOG2_E))
    quotient = (1 - decay) / (1 + decay)
    return tl.where(square < 0.0625, z * series, tl.where(z < 0, -quotient, quotient))


@triton.jit
def _soft_cap(value, CAP: tl.constexpr):
    if CAP != 0:
        value = _tanh(value / CAP) * CAP
    return value


@triton.jit
def _act(
    gate,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_MAX: tl.constexpr,
    ACT_MAX: tl.constexpr,
    GATE_CAP: tl.constexpr,
):
    """act(min(gate, gate_max)) cut at act_max, as `activations` states it. NaN stays NaN."""
    if GATE_MAX != _UNLIMITED:
        gate = tl.where(gate > GATE_MAX, GATE_MAX, gate)
    if KIND == "sigmoid":
        value = _soft_cap(gate, GATE_CAP) / (1 + tl.exp2(gate * (-ALPHA * _LOG2_E)))
    elif KIND == "gelu":
        value = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        value = 0.5 * gate * (1 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    elif KIND == "relu2":
        value = tl.where(gate < 0, 0.0, gate * gate)
    else:
        value = tl.where(gate < 0, 0.0, gate)
    if ACT_MAX != _UNLIMITED:
        value = tl.where(value > ACT_MAX, ACT_MAX, value)
    return value


@triton.jit
def _cut_up(up, UP_MAX: tl.constexpr, UP_CAP: tl.constexpr, UP_ADD: tl.constexpr):
    if UP_MAX != _UNLIMITED:
        up = tl.where(up > UP_MAX, UP_MAX, tl.where(up < -UP_MAX, -UP_MAX, up))
    return _soft_cap(up, UP_CAP) + UP_ADD


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
def _gate(
    sums,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    GATE_MAX: tl.constexpr,
    ACT_MAX: tl.constexpr,
    UP_MAX: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    UP_ADD: tl.constexpr,
):
    """What goes into the second projection, of sums in the order of `_first_rows`."""
    if GATED:
        rows: tl.constexpr = sums.shape[0]
        columns: tl.constexpr = sums.shape[1]
        pairs = tl.permute(tl.reshape(sums, (rows // 16, 2, 8, columns)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        value = _act(gate, KIND, ALPHA, GATE_MAX, ACT_MAX, GATE_CAP) * _cut_up(up, UP_MAX, UP_CAP, UP_ADD)
        value = tl.reshape(value, (rows // 2, columns))
    else:
        value = _act(sums, KIND, ALPHA, GATE_MAX, ACT_MAX, GATE_CAP)
    return value


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
            sums += _float(tl.load(bias + expert.to(tl.int64) * N + rows))[:, None]
        value = _gate(sums, GATED, KIND, ALPHA, GATE_MAX, ACT_MAX, UP_MAX, GATE_CAP, UP_CAP, UP_ADD)
        column = row_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        pointers = out + slot[None, :] * MIDDLE + _place(column, MIDDLE, PLANES)[:, None]
        mask = alive[None, :] & (column < MIDDLE)[:, None]
        _store_parts(pointers, value, mask, slots.to(tl.int64) * MIDDLE, PARTS)


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
            sums += _float(tl.load(bias + expert.to(tl.int64) * N + rows))[:, None]
        if weights is not None:
            sums *= _float(tl.load(weights + slot, mask=alive, other=0))[None, :]
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
            factor, power = _factors(tl.load(scales_at, mask=inside, other=0), NARROW)
            factor = _spread(factor, BLOCK_K)
            power = _spread(power, BLOCK_K)
            weights_0 = tl.trans(_plane(codes, factor, power, 0, NARROW, MULTIPLY))
            weights_1 = tl.trans(_plane(codes, factor, power, 1, NARROW, MULTIPLY))
            weights_2 = tl.trans(_plane(codes, factor, power, 2, NARROW, MULTIPLY))
            weights_3 = tl.trans(_plane(codes, factor, power, 3, NARROW, MULTIPLY))
            for part in tl.static_range(PARTS):
                operand = _operand(tl.load(x_at + part * stride, mask=inside, other=0), MULTIPLY)
                sums_0 = _times(weights_0, operand, sums_0, part, NARROW)
                sums_1 = _times(weights_1, operand, sums_1, part, NARROW)
                sums_2 = _times(weights_2, operand, sums_2, part, NARROW)
                sums_3 = _times(weights_3, operand, sums_3, part, NARROW)
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
        codes = _load(words_at, (word < K // 8 - k // 8)[None, :], whole)
        byte = _load(scales_at, (group < K // 32 - k // 32)[None, :], whole).to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        power = _spread(bits, BLOCK_K).to(tl.float32, bitcast=True)
        inner = tl.zeros((BLOCK_ROWS, BLOCK_K // 4), dtype=tl.float32)
        for plane in tl.static_range(4):
            pairs = _pairs(codes, plane)
            weights = _side_by_side(_first_float(pairs), _second_float(pairs))
            value = tl.zeros((BLOCK_K // 4,), dtype=tl.float32)
            for part in tl.static_range(PARTS):
                at = x_at + part * part_stride + plane * (K // 4)
                value += _float(_load(at, element < K // 4 - k // 4, whole))
            inner += weights * (value * _HALF_OF_126)[None, :]
        sums += inner * _HALF_OF_126 * _side_by_side(power, power)
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
            sums += _float(tl.load(bias + expert * N + rows))
        value = _gate(sums[:, None], GATED, KIND, ALPHA, GATE_MAX, ACT_MAX, UP_MAX, GATE_CAP, UP_CAP, UP_ADD)
        column = row_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        pointers = out + slot * MIDDLE + _place(column, MIDDLE, True)[:, None]
        _store_parts(pointers, value, (column < MIDDLE)[:, None], slots.to(tl.int64) * MIDDLE, PARTS)


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
            sums += _float(tl.load(bias + expert * N + rows))
        tl.store(out + slot * N + row, sums * _float(tl.load(weights + slot)), mask=row < N)


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
    value = _float(tl.load(x + start + column, mask=column < K, other=0))
    pointers = out + start + _place(column, K, PLANES)
    _store_parts(pointers, value, column < K, tokens.to(tl.int64) * K, PARTS)


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
    tl.store(out + token * N + column, _cast(sums, out), mask=column < N)

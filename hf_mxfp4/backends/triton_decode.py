"""What the Triton kernels are made of: decoding weights, holding activations, and what stands between projections.

A word is the 32 bits of eight neighbouring weights of a row, code i at bit 4 i.

Four planes. Shifted left by 12 - 4 j, a word has the codes j and j + 4 at the upper ends of its two halves: two shifts,
two logical operations and one multiplication make two bfloat16 weights of it that already stand side by side. So the
columns of activations, not the bytes of weights, are put into another order: plane j of four holds, word by word, the
columns 8 w + j and 8 w + j + 4. Weights stand on the left of every product.

Parts. Activations are held as bfloat16 bits, in as many parts as it takes for their sum to be what was given: one for
bfloat16, two for float16 (8 + 3 bits), three for float32 (8 + 8 + 8). A weight is a bfloat16 in any case, products
are exact in float32, and a weight that is decoded is multiplied by all parts.

MULTIPLY says how two bfloat16 are multiplied, and is all that differs between interpreted and compiled code: "ptx",
an instruction of NVIDIA's; "float32", for other GPUs; "interpreted", which leaves both factors in float32, because
Triton's interpreter computes bfloat16 as the integers of its bits. In each the product is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_SIGNS = tl.constexpr(-0x7FFF8000)  # the signs of two bfloat16, as int32
_MAGNITUDES = tl.constexpr(0x01C001C0)  # where the three bits of a code become two bits of exponent and one of fraction
_INFINITY = tl.constexpr(0x7F800000)
_UNLIMITED = tl.constexpr(float("inf"))


@triton.jit
def as_float(bits_or_value):
    """float32 of float16 or float32 values, or of bfloat16 bits in int16."""
    if bits_or_value.dtype == tl.int16:
        value = (bits_or_value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = bits_or_value.to(tl.float32)
    return value


@triton.jit
def load_inside(pointers, inside, WHOLE: tl.constexpr):
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
def cast_like(value, like):
    """A float32 as what is stored where `like` points: float32, float16 or bfloat16 bits."""
    if like.dtype.element_ty == tl.int16:
        cast = _round(value)
    else:
        cast = value.to(like.dtype.element_ty)
    return cast


@triton.jit
def store_parts(pointers, value, mask, stride, PARTS: tl.constexpr):
    """Stores a float32 as bfloat16 parts, `stride` elements apart; what is not finite is the first part alone."""
    for part in tl.static_range(PARTS):
        if part == PARTS - 1:
            bits = _round(value)
        else:
            whole = value.to(tl.int32, bitcast=True)
            finite = (whole & _INFINITY) != _INFINITY
            bits = tl.where(value != value, 0x7FC0, whole >> 16).to(tl.int16)
            value = tl.where(finite, value - as_float(bits), 0.0)
        tl.store(pointers + part * stride, bits, mask=mask)


@triton.jit
def held_at(column, K: tl.constexpr, PLANES: tl.constexpr):
    """Where a column of activations is held."""
    place = column
    if PLANES:
        place = (column % 4) * (K // 4) + column // 8 * 2 + column // 4 % 2
    return place


@triton.jit
def plane_pairs(words, plane: tl.constexpr):
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
def first_float(pairs):
    """float32 of the lower of two bfloat16 in each int32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def second_float(pairs):
    """float32 of the upper of two bfloat16 in each int32."""
    return (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(pairs, factor, MULTIPLY: tl.constexpr):
    """Multiplies two bfloat16 in each int32 by the two in `factor`, both the same."""
    if MULTIPLY == "ptx":
        product = _twice(pairs, factor)
    else:
        wide = second_float(factor)
        first = (first_float(pairs) * wide).to(tl.int32, bitcast=True)
        second = (second_float(pairs) * wide).to(tl.int32, bitcast=True)
        product = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    return product


@triton.jit
def side_by_side(first, second):
    """[R, W] and [R, W] to [R, 2 W], elements taking turns."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def plane_weights(words, factor, power, plane: tl.constexpr, NARROW: tl.constexpr, MULTIPLY: tl.constexpr):
    """The weights of a plane, [R, 2 W]: bfloat16, or float32 where interpreted."""
    product = _multiply(plane_pairs(words, plane), factor, MULTIPLY)
    if not NARROW:
        product = _multiply(product, power, MULTIPLY)
    if MULTIPLY == "interpreted":
        weights = side_by_side(first_float(product), second_float(product))
    else:
        halves = side_by_side(product.to(tl.int16), (product >> 16).to(tl.int16))
        weights = halves.to(tl.bfloat16, bitcast=True)
    return weights


@triton.jit
def add_product(weights, operand, sums, part: tl.constexpr, NARROW: tl.constexpr):
    """Adds a product with one part of activations; infinite weights, of scales above 2^125, are for the first alone."""
    if part > 0 and not NARROW:
        weights = tl.where((weights < float("inf")) & (weights > float("-inf")), weights, 0.0)
    return tl.dot(weights, operand, sums)


@triton.jit
def _both(bits):
    """bfloat16 bits in both halves of an int32."""
    return bits | (bits << 16)


@triton.jit
def scale_factors(scales, NARROW: tl.constexpr):
    """What `plane_pairs` are multiplied by, and then by: 2^126 times the scale, at once where that is a bfloat16."""
    byte = scales.to(tl.int32)
    if NARROW:
        factor = _both((byte + 126) << 7)
        power = factor
    else:
        factor = tl.full(byte.shape, 0x7E807E80, tl.int32)
        power = _both(tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7)))
    return factor, power


@triton.jit
def spread_groups(groups, BLOCK_K: tl.constexpr):
    """[R, BLOCK_K / 32] to [R, BLOCK_K / 8]: what a group of 32 weights has, for each of its four words."""
    rows: tl.constexpr = groups.shape[0]
    spread = tl.broadcast_to(groups[:, :, None], (rows, BLOCK_K // 32, 4))
    return tl.reshape(spread, (rows, BLOCK_K // 8))


@triton.jit
def as_operand(values, MULTIPLY: tl.constexpr):
    """Activations as what a product takes: bfloat16 as they were loaded, or float32 of bits where interpreted."""
    if MULTIPLY == "interpreted":
        values = as_float(values)
    return values


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
def apply_gate(
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

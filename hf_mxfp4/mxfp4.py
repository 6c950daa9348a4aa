"""The MXFP4 format: constants, quantize, dequantize.

An MXFP4 weight is an E2M1 code times an E8M0 scale that 32 consecutive weights of one output row share
(OCP Microscaling Formats (MX) Specification v1.0, sections 5.2, 5.4 and 6.3):

    E2M1 code c (4 bits)   0  1    2  3    4  5  6  7   8..15
    value                  0  0.5  1  1.5  2  3  4  6   the same, negative (8 is -0.0)
    E8M0 byte s            2 ** (s - 127) for s in 0..254; s = 255 is NaN. s = 0 is 2 ** -127, never zero

Canonical tensors, K weights in a row:

    blocks  uint8 [..., K / 2]    byte j holds column 2j in its low nibble and column 2j + 1 in its high one
    scales  uint8 [..., K / 32]   byte g scales columns 32g to 32g + 31

Four bits a code and eight bits for 32 of them are 4.25 bits a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import pages

BLOCK_SIZE = 32
"""Weights that share one scale byte."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each E2M1 code."""

SCALE_NAN = 255
"""The E8M0 byte that makes a whole block NaN."""

ScaleRule = Literal["mse", "even", "floor", "rceil"]
Ties = Literal["even", "zero", "away"]
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
TIES: tuple[Ties, ...] = get_args(Ties)

QUANTIZE_CHUNK_BYTES = 2 << 20
"""Working memory that `quantize` allows itself, in bytes, whatever the size of the weight."""

_WORKING_BYTES_PER_WEIGHT = 16
_DEQUANTIZE_BLOCKS = 1 << 15
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)

# Midpoints between neighbouring magnitudes, and whether `ties="even"` takes the upper one (whose code is then even).
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))

# A rule moves the block's largest magnitude up one binade where adding this to its float32 bits carries into the
# exponent: `even` from 1.75 * 2^n on, `rceil` above 1.5 * 2^n.
_CARRY = {"floor": 0, "even": 0x200000, "rceil": 0x3FFFFF}

# The pair table: byte -> (value of its low nibble, value of its high nibble), viewed as one number so that a single
# index_select decodes two weights. And byte -> scale. Both exact in each dtype (float16 has no room for the scales).
_PAIR_INT = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}
_VALUES = torch.tensor(E2M1_VALUES, dtype=torch.float64, device="cpu")
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=-1)
_POWERS = torch.ldexp(_VALUES.new_ones(256), torch.arange(256, device="cpu") - 127)
_POWERS[SCALE_NAN] = float("nan")
_PAIR_TABLES = {dtype: _PAIRS.to(dtype).view(-1).view(pair) for dtype, pair in _PAIR_INT.items()}
_POWER_TABLES = {dtype: _POWERS.to(dtype) for dtype in _PAIR_TABLES}


class MXFP4Tensor(NamedTuple):
    """A weight in canonical MXFP4: `blocks` uint8 [..., K / 2] and `scales` uint8 [..., K / 32]."""

    blocks: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, [..., K] in `dtype`: see the function `dequantize`."""
        return dequantize(self.blocks, self.scales, dtype)


def canonical(blocks: Tensor, scales: Tensor) -> MXFP4Tensor:
    """Views packed bytes in either layout as canonical ones; no byte is changed or copied.

    Args:
        blocks: [..., K / 2], or [..., K / 32, 16] as gpt-oss files have them; any one-byte dtype that holds codes.
        scales: [..., K / 32]; uint8, or float8_e8m0fnu, which is viewed and never cast.

    Returns:
        `blocks` as uint8 [..., K / 2] and `scales` as uint8 [..., K / 32].

    Raises:
        TypeError: a dtype that does not hold bytes.
        ValueError: shapes that do not fit each other.
    """
    blocks, scales = as_bytes(blocks, "blocks"), as_bytes(scales, "scales")
    fits = "[..., K/2] or [..., K/32, 16] with scales [..., K/32]"
    if scales.ndim == 0 or blocks.ndim not in (scales.ndim, scales.ndim + 1):
        raise ValueError(f"blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}; expected blocks {fits}")
    grouped = blocks.ndim == scales.ndim + 1
    if blocks.shape != blocks_shape(scales.shape, grouped=grouped):
        raise ValueError(f"blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}; expected blocks {fits}")
    return MXFP4Tensor(blocks.flatten(-2) if grouped else blocks, scales)


def blocks_shape(scales: tuple[int, ...], *, grouped: bool = False) -> tuple[int, ...]:
    """The shape of blocks whose scales have the shape `scales` [..., K / 32]: [..., K / 2], or [..., K / 32, 16]."""
    return (*scales, 16) if grouped else (*scales[:-1], 16 * scales[-1])


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """Views a tensor of one-byte elements as uint8; TypeError, naming it, for one that does not hold packed bytes."""
    if tensor.dtype not in _BYTE_DTYPES:
        raise TypeError(f"{name} have dtype {tensor.dtype}; packed MXFP4 bytes are torch.uint8")
    return tensor.view(torch.uint8)


def check_options(scale_rule: str, ties: str) -> None:
    """Raises ValueError unless both are options of `quantize`."""
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule is {scale_rule!r}; expected one of {', '.join(SCALE_RULES)}")
    if ties not in TIES:
        raise ValueError(f"ties is {ties!r}; expected one of {', '.join(TIES)}")


class Rounder(NamedTuple):
    """What rounds a chunk of weights.

    Attributes:
        round: given contiguous float32, bfloat16 or float16 [n, 32], a scale rule and how ties go, gives `blocks`
            [n, 16] and `scales` [n], or None if a weight is not finite.
        working_bytes: memory that this takes for each weight.
    """

    round: Callable[[Tensor, str, str], MXFP4Tensor | None]
    working_bytes: int


def quantize(
    weight: Tensor,
    scale_rule: ScaleRule = "mse",
    ties: Ties = "even",
    *,
    name: str = "weight",
    rounder: Rounder | None = None,
) -> MXFP4Tensor:
    """Rounds a weight to MXFP4, one E8M0 scale per 32 weights of a row.

    With 2^n the binade of a block's largest magnitude (2^n <= largest < 2^(n+1)), `floor` takes the scale 2^(n-2) of
    OCP MX v1.0 section 6.3; `even` one more from 1.75 * 2^n on, where the largest would round up; `rceil` one more
    above 1.5 * 2^n, so that nothing saturates; `mse` whichever of floor and floor + 1 has the smaller squared error,
    floor on a tie. Codes are the nearest value, saturating at 6. Blocks of zeros get scale byte 0. At the top of
    float32's range the three rules that move up can choose 2^128, which is infinity where it is decoded to float32.

    Args:
        weight: [..., K], float32, bfloat16 or float16, K a multiple of 32, all values finite. Not changed. Needs not be
            contiguous. Works in chunks of `QUANTIZE_CHUNK_BYTES`, whatever the size.
        scale_rule: `mse`, `even`, `floor` or `rceil`.
        ties: which neighbour a value halfway between two takes: the `even` code, the one nearer to `zero` (as gguf),
            or the one `away` from it.
        name: what errors call the weight.
        rounder: does the arithmetic; by default in torch, on any device.

    Returns:
        `blocks` uint8 [..., K / 2] and `scales` uint8 [..., K / 32] on the weight's device.

    Raises:
        TypeError: a dtype that is none of the three.
        ValueError: an unknown rule, K no multiple of 32, or a value that is not finite, by index.
    """
    check_options(scale_rule, ties)
    if weight.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {weight.dtype}; quantize takes float32, bfloat16 or float16")
    check_width(weight.shape, name)
    *lead, width = weight.shape
    blocks = torch.empty(*lead, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*lead, width // BLOCK_SIZE, dtype=torch.uint8, device=weight.device)
    rounder = rounder or Rounder(_quantize_chunk, _WORKING_BYTES_PER_WEIGHT)
    _quantize_into(weight.detach(), MXFP4Tensor(blocks, scales), (scale_rule, ties), (name, ()), rounder)
    return MXFP4Tensor(blocks, scales)


def check_width(shape: torch.Size | tuple[int, ...], name: str) -> None:
    """Raises ValueError, naming `name`, unless the last dimension of `shape` is a multiple of 32."""
    width = shape[-1] if len(shape) else 1
    if width % BLOCK_SIZE:
        raise ValueError(
            f"{name}: width {width} of shape {list(shape)} is not a multiple of {BLOCK_SIZE}, the MXFP4 block size"
        )


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that packed bytes stand for: value of the code times 2 ** (scale byte - 127), NaN for byte 255.

    Exact in float32, bfloat16 and float64, subnormal results and infinities past the dtype's range included; float16
    is the float32 result rounded once.

    Args:
        blocks: uint8 [..., K / 2] or [..., K / 32, 16].
        scales: uint8 or float8_e8m0fnu [..., K / 32].
        dtype: of the result.

    Returns:
        [..., K] in `dtype`, on the device of `blocks`.

    Raises:
        TypeError: packed tensors that are not bytes, or a `dtype` that is not floating point.
        ValueError: shapes that do not fit each other.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype}; dequantize gives a floating point tensor")
    blocks, scales = canonical(blocks, scales)
    compute = dtype if dtype in _PAIR_TABLES else torch.float32
    out = pages.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), blocks.device, compute)
    flat, powers, values = blocks.reshape(-1, 16), scales.reshape(-1), out.view(-1, BLOCK_SIZE)
    index = torch.empty(min(blocks.numel(), 16 * _DEQUANTIZE_BLOCKS), dtype=torch.int32, device=blocks.device)
    for top in range(0, flat.shape[0], _DEQUANTIZE_BLOCKS):
        part = slice(top, top + _DEQUANTIZE_BLOCKS)
        dequantize_into(flat[part], powers[part, None], values[part], index)
    return out.to(dtype)


def dequantize_into(blocks: Tensor, scales: Tensor, out: Tensor, index: Tensor) -> Tensor:
    """`dequantize` into memory that is used again: fresh memory for each expert costs more than the decode.

    Args:
        blocks: uint8 [..., K / 2].
        scales: uint8 [..., K / 32].
        out: bfloat16, float32 or float64 [..., K], contiguous, overwritten.
        index: int32, contiguous, at least as many as there are bytes in `blocks`, overwritten.

    Returns:
        `out`.
    """
    pairs, powers = _PAIR_TABLES[out.dtype].to(out.device), _POWER_TABLES[out.dtype].to(out.device)
    index = index[: blocks.numel()].copy_(blocks.reshape(-1))
    torch.index_select(pairs, 0, index, out=out.view(-1).view(_PAIR_INT[out.dtype]))
    values = out.view(*scales.shape, BLOCK_SIZE)
    values.mul_(powers.index_select(0, scales.reshape(-1).int()).view(*scales.shape, 1))
    return out


def _quantize_into(
    weight: Tensor, out: MXFP4Tensor, rules: tuple[str, str], label: tuple[str, tuple[int, ...]], rounder: Rounder
) -> None:
    """Quantizes `weight` [..., K] into `out`, a chunk at a time. `label` names it and its place in errors."""
    width = weight.shape[-1]
    if weight.numel() == 0:
        return
    if weight.ndim > 2:  # index by index: flattening a transposed stack would copy all of it
        for i in range(weight.shape[0]):
            part = MXFP4Tensor(out.blocks[i], out.scales[i])
            _quantize_into(weight[i], part, rules, (label[0], (*label[1], i)), rounder)
        return
    rows, blocks, scales = torch.atleast_2d(weight), torch.atleast_2d(out.blocks), torch.atleast_2d(out.scales)
    budget = max(QUANTIZE_CHUNK_BYTES // rounder.working_bytes, BLOCK_SIZE)
    columns = min(width, budget // BLOCK_SIZE * BLOCK_SIZE)
    step = max(1, budget // columns)
    for top, left in product(range(0, rows.shape[0], step), range(0, width, columns)):
        chunk = rows[top : top + step, left : left + columns].contiguous()
        height, span = chunk.shape
        packed = rounder.round(chunk.view(-1, BLOCK_SIZE), *rules)
        if packed is None:
            row, column = (~torch.isfinite(chunk)).nonzero()[0].tolist()
            index = [*label[1], *([top + row] if weight.ndim == 2 else []), left + column]
            value = chunk[row, column].item()
            raise ValueError(f"{label[0]} holds {value} at index {index}; only finite weights can be quantized")
        blocks[top : top + height, left // 2 : (left + span) // 2] = packed.blocks.view(height, -1)
        scales[top : top + height, left // BLOCK_SIZE : (left + span) // BLOCK_SIZE] = packed.scales.view(height, -1)


def _quantize_chunk(chunk: Tensor, scale_rule: str, ties: str) -> MXFP4Tensor | None:
    """`blocks` [n, 16] and `scales` [n] of weights [n, 32]; None if a value is not finite."""
    chunk = chunk.float()
    largest = chunk.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        return None
    scale = _scale_bytes(chunk, largest, scale_rule)
    # Two codes, a byte each, as one little-endian number: the first in the low byte, as it will be in the low nibble.
    nibbles = _round_to_codes(chunk * _reciprocal(scale), ties).view(torch.int16)
    return MXFP4Tensor((nibbles | nibbles >> 4).to(torch.uint8), scale.to(torch.uint8))


def _scale_bytes(chunk: Tensor, largest: Tensor, scale_rule: str) -> Tensor:
    """The E8M0 byte of each row of `chunk`, int32 [n]. `chunk` is float32 [n, 32], `largest` its row maxima [n].

    float32 and E8M0 share the bias 127, so the exponent bits less 2 are the byte that `floor` wants; below 0 there is
    no smaller scale. For `mse`, every value that the scale floor + 1 can give up to 6 is one that floor can give too,
    so that only a block whose largest magnitude would round past 6, one that `even` moves up, can gain by it.

    What the larger scale adds to a squared error, (s - v2)^2 - (s - v1)^2 = (v1 - v2) * (2s - v1 - v2), is 0 wherever
    both round to one value. Else |s| > 2^-2, so that s is a multiple of 2^-25, and so is the term, at most 4 in
    magnitude: 32 of them are sums of 32 bits, exact in float64 in any order.
    """
    bits = largest.view(torch.int32)
    if scale_rule != "mse":
        return ((bits + _CARRY[scale_rule]) >> 23).sub_(2).clamp_(min=0)
    floor, even = (((bits + _CARRY[rule]) >> 23).sub_(2).clamp_(min=0) for rule in ("floor", "even"))
    open_blocks = (even > floor).nonzero().squeeze(-1)
    scaled = chunk[open_blocks] * _reciprocal(floor[open_blocks])
    values = _VALUES.to(chunk.device)
    v1, v2 = (step * values[_round_to_codes(scaled / step, "even").int()] for step in (1, 2))
    added = ((v1 - v2) * (2 * scaled.double() - v1 - v2)).sum(dim=-1)
    return floor.index_add_(0, open_blocks, (added < 0).int())


def _reciprocal(scale: Tensor) -> Tensor:
    """2 ** (127 - byte) as float32 [n, 1], exact, from bytes int32 [n] of 0 to 253."""
    return ((254 - scale) << 23).view(torch.float32).unsqueeze(-1)


def _round_to_codes(scaled: Tensor, ties: str) -> Tensor:
    """The nearest E2M1 code of each value, uint8, saturating: midpoints that the magnitude has passed, and the sign."""
    magnitude = scaled.abs()
    codes = torch.signbit(scaled).view(torch.uint8) << 3
    for midpoint, to_even in _MIDPOINTS:
        up_on_tie = to_even if ties == "even" else ties == "away"
        codes += (magnitude >= midpoint if up_on_tie else magnitude > midpoint).view(torch.uint8)
    return codes

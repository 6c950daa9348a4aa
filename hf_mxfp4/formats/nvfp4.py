"""NVFP4 layouts: E2M1 codes like MXFP4's under two levels of scales, which are not powers of two.

    weight = E2M1 value * E4M3 scale that 16 weights of a row share * float32 scale of the tensor

Named tensors, N rows of K weights:

    codes         uint8 [..., N, K / 2]            byte j: column 2j in its low nibble, column 2j + 1 in its high one
    scales        float8_e4m3fn [..., N, K / 16]   1 sign, 4 exponent (bias 7) and 3 mantissa bits; 0x7F, 0xFF are NaN
    tensor_scale  float32                          what two producers write under two names, each the other's inverse:
                  ModelOpt             weight_scale_2       amax / (6 * 448)   multiply by it
                  compressed-tensors   weight_global_scale  6 * 448 / amax     divide by it: `reciprocal`

GGUF tensor type 40, 64 weights in 36 bytes; the tensor's float32 scale is a tensor of its own:

    bytes 0-3     UE4M3, E4M3 without a sign, one for each 16 weights
    bytes 4-35    8 for each 16 weights; byte i: weight i in its low nibble, weight i + 8 in its high one

GGUF's readers hold twice the E2M1 values in their tables and half the scales, which comes to the same weights. Sources:
NVIDIA's ModelOpt and compressed-tensors, and the gguf package for the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mxfp4 import E2M1_VALUES
from .base import Dialect, whole_blocks
from .per_expert import formats

BLOCK_SIZE = 16
"""Weights that share one E4M3 scale."""

GGUF_BLOCK_SIZE = 64
"""Weights in one block of GGUF type 40."""

GGUF_BLOCK_BYTES = 36
"""Bytes of one block of GGUF type 40: four scales and 64 codes."""

_SCALES = GGUF_BLOCK_SIZE // BLOCK_SIZE
_VALUES = torch.tensor(E2M1_VALUES, dtype=torch.float32, device="cpu")
# byte -> (value of its low nibble, value of its high nibble)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=-1)


def decode(codes: Tensor, scales: Tensor, tensor_scale: Tensor, *, reciprocal: bool) -> Tensor:
    """The float32 weights of NVFP4 as safetensors files hold it.

    The product of a value and its E4M3 scale has at most 6 significant bits and is exact; multiplying it by the
    tensor's scale, or dividing it, rounds to float32: once in all. Who combines the two scales first rounds twice.

    Args:
        codes: uint8 [..., N, K / 2].
        scales: float8_e4m3fn, or its bytes as uint8, [..., N, K / 16]. NaN bytes make 16 weights NaN.
        tensor_scale: float32, one element or what broadcasts to [..., 1, 1].
        reciprocal: whether the weight is divided by `tensor_scale`, as compressed-tensors means it, or multiplied by
            it, as ModelOpt does. The wrong choice is off by the square of the scale and raises nothing.

    Returns:
        float32 [..., N, K].

    Raises:
        ValueError: a dtype that is none of these, or shapes that do not fit each other.
    """
    _check(codes, scales, tensor_scale)
    values = _pairs(codes).view(*scales.shape, BLOCK_SIZE)
    values.mul_(scales.view(torch.float8_e4m3fn).float().unsqueeze(-1))
    weight = values.flatten(-2)
    factor = tensor_scale.reshape(()) if tensor_scale.numel() == 1 else tensor_scale
    return weight.div_(factor) if reciprocal else weight.mul_(factor)


def decode_gguf(blocks: Tensor) -> Tensor:
    """The float32 weights of blocks of GGUF type 40, without the tensor's scale; exact, nothing is rounded.

    Scales have no sign: bit 7 is ignored, as other readers ignore it. Byte 0x7F, which is NaN in E4M3, is 0 as in
    those; 0xFF is the same scale here, where they take it for 480. Producers write neither. Code 8 is -0.0.

    Args:
        blocks: uint8 [..., N, K / 64 * 36].

    Returns:
        float32 [..., N, K].

    Raises:
        ValueError: another dtype, or rows that are not whole blocks.
    """
    blocks = whole_blocks(blocks, "NVFP4", GGUF_BLOCK_SIZE, GGUF_BLOCK_BYTES)
    scales: Tensor = (blocks[..., :_SCALES] & 0x7F).view(torch.float8_e4m3fn).float().nan_to_num_(nan=0.0)
    pairs: Tensor = _pairs(blocks[..., _SCALES:]).unflatten(-2, (_SCALES, BLOCK_SIZE // 2))
    # [..., 8, 2] to the eight low nibbles and then the eight high ones.
    values = pairs.transpose(-1, -2).flatten(-2) * scales.unsqueeze(-1)
    return values.flatten(-3)


def _pairs(codes: Tensor) -> Tensor:
    """The values of the low and the high nibble of each byte, float32 [..., 2]."""
    values = torch.index_select(_PAIRS.to(codes.device), 0, codes.reshape(-1).int())
    return values.view(*codes.shape, 2)


def _check(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}; expected torch.uint8")
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"scales have dtype {scales.dtype}; expected torch.float8_e4m3fn or torch.uint8")
    if tensor_scale.dtype != torch.float32:
        raise ValueError(f"tensor_scale has dtype {tensor_scale.dtype}; expected torch.float32")
    if scales.ndim == 0 or codes.shape != (*scales.shape[:-1], scales.shape[-1] * BLOCK_SIZE // 2):
        raise ValueError(
            f"codes {list(codes.shape)} do not fit scales {list(scales.shape)}; expected codes [..., N, K / 2] with"
            f" scales [..., N, K / {BLOCK_SIZE}]"
        )
    lead = (*codes.shape[:-2], 1, 1)
    sizes = zip(reversed(tensor_scale.shape), reversed(lead), strict=False)
    fits = tensor_scale.ndim <= len(lead) and all(size in (1, whole) for size, whole in sizes)
    if tensor_scale.numel() != 1 and not fits:
        raise ValueError(
            f"tensor_scale {list(tensor_scale.shape)} does not fit codes {list(codes.shape)}; expected one element or"
            f" {list(lead)}"
        )


FORMAT = "nvfp4-pack-quantized"


def _codes_shape(scales: tuple[int, ...]) -> tuple[int, ...]:
    return (*scales[:-1], BLOCK_SIZE // 2 * scales[-1])


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "modelopt" and "nvfp4" in str(config.get("quant_algo")).lower()


def _no_config(dense: list[str]) -> dict[str, Any]:
    raise ValueError("NVFP4 is read and not written")


COMPRESSED_TENSORS = Dialect(
    name="nvfp4 (compressed-tensors)",
    layout="per expert",
    endings=(".weight_packed", ".weight_scale", ".weight_global_scale"),
    dtypes=("U8", "F8_E4M3", "F32"),
    decode=partial(decode, reciprocal=True),
    encode=None,
    claims=lambda config: config.get("quant_method") == "compressed-tensors" and FORMAT in formats(config),
    config=_no_config,
    dims=2,
    codes_shape=_codes_shape,
    is_lossy=True,
)
MODELOPT = Dialect(
    name="nvfp4 (modelopt)",
    layout="per expert",
    endings=(".weight", ".weight_scale", ".weight_scale_2"),
    dtypes=("U8", "F8_E4M3", "F32"),
    decode=partial(decode, reciprocal=False),
    encode=None,
    claims=_is_modelopt,
    config=_no_config,
    dims=2,
    codes_shape=_codes_shape,
    is_lossy=True,
)

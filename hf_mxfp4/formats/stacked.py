"""All experts of a projection in one pair of tensors, gate and up rows of an expert in one matrix.

    gpt-oss            {experts}.{proj}_blocks uint8 [E, N, K / 32, 16], the 16 bytes of a block apart
    gpt-oss-original   block.{n}.mlp.{mlp1, mlp2}_weight.blocks, the same; .scales
    hf_mxfp4           {experts}.{proj}_blocks uint8 [E, N, K / 2], the canonical tensor itself
    vllm               {experts}.{w13, w2}_weight uint8 [E, N, K / 2]; _weight_scale
    all                scales uint8 [E, N, K / 32]

The bytes are the same, in the same order. Rows are in the order of the model's class: gate and up take turns in
gpt-oss models; in others all gates come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..mxfp4 import blocks_shape, canonical
from .base import Dialect

_STACKS = {"gate_up_proj": "gate_up_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
_METHOD = "mxfp4"


def unchanged(tensor: Tensor) -> Tensor:
    """A canonical tensor as it is stored: itself."""
    return tensor


def grouped(blocks: Tensor) -> Tensor:
    """Canonical blocks with the 16 bytes of each apart, by view."""
    apart: Tensor = blocks.unflatten(-1, (blocks.shape[-1] // 16, 16))
    return apart


def _grouped_shape(scales: tuple[int, ...]) -> tuple[int, ...]:
    return blocks_shape(scales, grouped=True)


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == _METHOD and config.get("format") in (None, "hf_mxfp4")


def _config(dense: list[str]) -> dict[str, Any]:
    return {"quant_method": _METHOD, "modules_to_not_convert": None}


GPT_OSS = Dialect(
    name="gpt-oss",
    layout="stacked",
    endings=("_blocks", "_scales"),
    dtypes=("U8", "U8"),
    decode=canonical,
    encode=(grouped, unchanged),
    claims=_claims,
    config=_config,
    dims=4,
    bias="_bias",
    projections=_STACKS,
    codes_shape=_grouped_shape,
)
GPT_OSS_ORIGINAL = Dialect(
    name="gpt-oss-original",
    layout="stacked",
    endings=("_weight.blocks", "_weight.scales"),
    dtypes=("U8", "U8"),
    decode=canonical,
    encode=None,
    claims=lambda config: False,
    config=_config,
    dims=4,
    bias="_bias",
    projections={"mlp1": "gate_up_proj", "mlp2": "down_proj"},
    container=("mlp",),
    codes_shape=_grouped_shape,
)
HF_MXFP4 = Dialect(
    name="hf_mxfp4",
    layout="stacked",
    endings=("_blocks", "_scales"),
    dtypes=("U8", "U8"),
    decode=canonical,
    encode=(unchanged, unchanged),
    claims=_claims,
    config=lambda dense: {**_config(dense), "format": "hf_mxfp4"},
    dims=3,
    bias="_bias",
    projections=_STACKS,
)
VLLM = Dialect(
    name="vllm",
    layout="stacked",
    endings=("_weight", "_weight_scale"),
    dtypes=("U8", "U8"),
    decode=canonical,
    encode=(unchanged, unchanged),
    claims=_claims,
    config=_config,
    dims=3,
    bias="_bias",
    projections={"w13": "gate_up_proj", "w2": "down_proj"},
)

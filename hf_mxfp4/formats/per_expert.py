"""One pair of tensors for each matrix of each expert: {experts}.{e}.{proj}, and an ending.

    compressed-tensors   .weight_packed uint8    .weight_scale uint8              what `mxfp4-pack-quantized` means
    auto-round           the same tensors
    quark                .weight uint8           .weight_scale uint8
    modelopt, mimo       the same tensors as quark
    deepseek-v4          .weight int8            .scale float8_e8m0fnu
    ling                 .weight int8            .weight_scale_inv uint8
    all                  codes [N, K / 2], low nibble first; scales [N, K / 32], biased by 127

{proj} goes by the model's own names for one expert's matrices (gate_proj, up_proj, down_proj; w1, w3, w2). How they
stack into the model's 3-D projections is the model's own conversion, which knows rows and not bytes. Dialects of the
same tensors are told apart by the config; for reading it makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..mxfp4 import BLOCK_SIZE, canonical
from .base import CheckpointError, Dialect

FORMAT = "mxfp4-pack-quantized"

_TORCH = {"U8": torch.uint8, "I8": torch.int8, "F8_E8M0": torch.float8_e8m0fnu}
_BLOCK_FP8 = [128, 128]


def groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The `config_groups` of a compressed-tensors config."""
    found = config.get("config_groups")
    found = found if isinstance(found, Mapping) else {}
    return {name: group for name, group in found.items() if isinstance(group, Mapping)}


def formats(config: Mapping[str, Any]) -> list[Any]:
    """Every format that a compressed-tensors config names."""
    return [config.get("format"), *(group.get("format") for group in groups(config).values())]


def is_ignored(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config leaves a linear layer out: by `ignore`, or because no group targets it."""
    targets = [target for group in groups(config).values() for target in _list(group, "targets")]
    targeted = any(target == "Linear" or _matches(name, target) for target in targets)
    return not targeted or any(_matches(name, pattern) for pattern in _list(config, "ignore"))


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    found = config.get(key)
    if found is not None and not isinstance(found, list):
        raise CheckpointError(f"{key} of the checkpoint's config is {found!r}; expected a list")
    return found or []


def _matches(name: str, pattern: Any) -> bool:
    """Whether a module's name is what a pattern names: a regular expression after `re:`, or the name itself."""
    if not isinstance(pattern, str):
        return False
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise CheckpointError(
                f"the checkpoint's config holds {pattern!r}, no regular expression: {error}"
            ) from error
    return name == pattern


def _row(
    name: str,
    endings: tuple[str, str],
    dtypes: tuple[str, str],
    claims: Callable[[Mapping[str, Any]], bool],
    config: Callable[[list[str]], dict[str, Any]],
) -> Dialect:
    views = (_viewed(dtypes[0]), _viewed(dtypes[1]))
    return Dialect(name, "per expert", endings, dtypes, canonical, views, claims, config, dims=2)


def _viewed(dtype: str) -> Callable[[Tensor], Tensor]:
    """What views bytes as a dtype of safetensors."""

    def view(tensor: Tensor) -> Tensor:
        return tensor.view(_TORCH[dtype])

    return view


def _compressed_tensors(dense: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "format": FORMAT,
        "targets": [r"re:.*\.experts\.\d+\..*"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _auto_round(dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:llm_compressor",
        "bits": 4,
        "group_size": BLOCK_SIZE,
        "data_type": "mx_fp",
        "sym": True,
        "act_bits": 16,
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in dense},
    }


def _is_auto_round(config: Mapping[str, Any]) -> bool:
    named = str(config.get("quant_method")).replace("_", "-") == "auto-round"
    return named and str(config.get("data_type")).startswith("mx_fp") and config.get("bits") == 4


def _quark(dense: list[str]) -> dict[str, Any]:
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": BLOCK_SIZE,
        "ch_axis": -1,
        "is_dynamic": False,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "observer_cls": "PerBlockMXObserver",
    }
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
        "exclude": dense,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "weight_format": "real_quantized", "pack_method": "reorder"},
    }


def quark_weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How a Quark config says that weights are stored: of all layers, and of some."""
    layers = config.get("layer_quant_config")
    schemes = [config.get("global_quant_config"), *(layers.values() if isinstance(layers, Mapping) else ())]
    found: list[Mapping[str, Any]] = []
    for scheme in schemes:
        weights = scheme.get("weight") if isinstance(scheme, Mapping) else None
        specs = weights if isinstance(weights, list) else [weights]
        found += [spec for spec in specs if isinstance(spec, Mapping)]
    return found


def _is_quark(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "quark" and any(
        spec.get("dtype") == "fp4"
        and spec.get("group_size") == BLOCK_SIZE
        and spec.get("scale_format") in ("e8m0", None)
        for spec in quark_weights(config)
    )


def _modelopt(dense: list[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": dense, "producer": {"name": "hf_mxfp4"}}


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "modelopt" and "mxfp4" in str(config.get("quant_algo")).lower()


def _fp8(dense: list[str], **keys: Any) -> dict[str, Any]:
    """A config of block FP8, with every linear layer beside the experts left out of it."""
    common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": _BLOCK_FP8}
    return {**common, "modules_to_not_convert": dense, **keys}


def _is_fp8_with(key: str, value: str) -> Callable[[Mapping[str, Any]], bool]:
    def claims(config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "fp8" and str(config.get(key)).lower() == value

    return claims


COMPRESSED_TENSORS = _row(
    "compressed-tensors",
    (".weight_packed", ".weight_scale"),
    ("U8", "U8"),
    lambda config: config.get("quant_method") == "compressed-tensors" and FORMAT in formats(config),
    _compressed_tensors,
)
AUTO_ROUND = _row("auto-round", (".weight_packed", ".weight_scale"), ("U8", "U8"), _is_auto_round, _auto_round)
QUARK = _row("quark", (".weight", ".weight_scale"), ("U8", "U8"), _is_quark, _quark)
MODELOPT = _row("modelopt", (".weight", ".weight_scale"), ("U8", "U8"), _is_modelopt, _modelopt)
MIMO = _row(
    "mimo",
    (".weight", ".weight_scale"),
    ("U8", "U8"),
    _is_fp8_with("store_dtype", "mxfp4"),
    lambda dense: _fp8(dense, store_dtype="mxfp4", mxfp4_block_size=BLOCK_SIZE),
)
DEEPSEEK_V4 = _row(
    "deepseek-v4",
    (".weight", ".scale"),
    ("I8", "F8_E8M0"),
    _is_fp8_with("expert_dtype", "fp4"),
    lambda dense: _fp8(dense, scale_fmt="ue8m0", expert_dtype="fp4"),
)
LING = _row(
    "ling",
    (".weight", ".weight_scale_inv"),
    ("I8", "U8"),
    _is_fp8_with("routed_experts_quant_method", "mxfp4"),
    lambda dense: _fp8(dense, routed_experts_quant_method="mxfp4", routed_experts_group_size=BLOCK_SIZE),
)
ROWS: tuple[Dialect, ...] = (COMPRESSED_TENSORS, AUTO_ROUND, QUARK, MODELOPT, MIMO, DEEPSEEK_V4, LING)

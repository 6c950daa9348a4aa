"""How Transformers comes to this quantizer: the registered method, and a few wrapped functions.

`get_hf_quantizer`, and `AutoHfQuantizer.merge_quantization_configs` and `supports_quant_method` that it calls, are
wrapped once, at import. The wrappers act for three kinds of load and hand every other one on unchanged: the caller
passes an MXFP4Config; the checkpoint carries this software's marker and the caller passes nothing; or, after
`enable()`, the checkpoint's config names MXFP4 and the caller passes nothing. The checkpoint's own config class is
never built, since some need packages of their own, and some checkpoints name no method at all.
`PreTrainedModel.save_pretrained` is wrapped for packed models, see `staging`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel, configuration_utils, modeling_gguf_pytorch_utils, modeling_utils
from transformers.quantizers import auto
from transformers.utils import cached_file

from ..formats import gguf
from ..formats.checkpoint import described
from . import staging
from .config import METHOD, MXFP4Config, is_marked, names_mxfp4
from .gguf import config_dict
from .hf_quantizer import MXFP4HfQuantizer


class _Takeover:
    """Whether plain loads of MXFP4 checkpoints are taken over."""

    enabled = False


_takeover = _Takeover()


class Enabled:
    """What `enable` returns: as a context manager it puts back what was before."""

    def __init__(self, before: bool) -> None:
        """Keeps what was before."""
        self._before = before

    def __enter__(self) -> Enabled:
        """Nothing more: `enable` has already acted."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Puts back what was before `enable`."""
        _takeover.enabled = self._before


def enable() -> Enabled:
    """From now on, plain `from_pretrained` of a checkpoint whose config names MXFP4 experts loads them packed.

    Returns:
        A context manager, for those who want it for a block of code only.
    """
    before, _takeover.enabled = _takeover.enabled, True
    return Enabled(before)


def disable() -> None:
    """Takes `enable` back. Folders that this software saved still load packed, and so do loads with an MXFP4Config."""
    _takeover.enabled = False


def _packed_save(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` as it was, but whole or not at all for packed models."""

    @wraps(stock)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "hf_quantizer", None), MXFP4HfQuantizer):
            return stock(self, save_directory, *args, **kwargs)
        if not kwargs.get("save_original_format", True):
            raise ValueError(
                "save_original_format=False would write packed experts under names that their config does not have;"
                " load with MXFP4Config(save_format='hf_mxfp4') to save experts stacked"
            )
        if staging.applies(save_directory, kwargs):
            return staging.save(stock, self, save_directory, *args, **kwargs)
        return stock(self, save_directory, *args, **kwargs)

    return save_pretrained


def _described(config: Any) -> dict[str, Any] | None:
    """What a model's config says of its weights, see `formats.checkpoint.described`; None if it says nothing."""
    levels = []
    for part in (config, config.get_text_config(decoder=True)):
        stored: Any = getattr(part, "quantization_config", None)
        level = {"quantization_config": stored.to_dict() if hasattr(stored, "to_dict") else stored}
        levels.append(level | {key: getattr(part, key, None) for key in ("quantization", "expert_dtype")})
    return described({**levels[0], "text_config": levels[1]}) or None


def _ours(config: Any, asked: Any) -> MXFP4Config | None:
    """The config of a load that is ours; None for any other load."""
    if isinstance(asked, dict) and asked.get("quant_method") == METHOD:
        asked = MXFP4Config.from_dict(asked)
    if asked is not None and not isinstance(asked, MXFP4Config):
        return None
    stored = _described(config)
    if asked is not None:
        return asked if stored is None else asked.loading(stored)
    if is_marked(stored) or (_takeover.enabled and names_mxfp4(stored) and _has_experts(config)):
        return MXFP4Config.from_stored(stored)  # type: ignore[arg-type]  # a mapping, as both have found
    return None


def _has_experts(config: Any) -> bool:
    """Whether a model's config speaks of experts. One that does not is of a dense model, which stays stock's."""
    described = {**config.to_dict(), "quantization_config": None}
    text = described.get("text_config")
    if isinstance(text, dict):
        described["text_config"] = {**text, "quantization_config": None}
    # A class's own values are not in the dictionary; every config has one for how experts are computed.
    names = {name for part in (config, config.get_text_config(decoder=True)) for name in dir(part)}
    return "expert" in str(described) or any("expert" in n and "implementation" not in n for n in names)


def _holds_mxfp4(config: Any, gguf_file: str | None) -> bool:
    """Whether a GGUF file beside a model's config, or in the cache, holds experts in MXFP4."""
    if gguf_file is None:
        return False
    found = gguf_file if Path(gguf_file).is_file() else None
    if found is None and config.name_or_path:
        options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
        found = cached_file(config.name_or_path, gguf_file, **options)
    return found is not None and gguf.detect(gguf.read_header(found)).dialect is gguf.MXFP4


def _gguf_config(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`load_gguf_checkpoint` as it was, but where it fails over a config that this software can make."""

    @wraps(stock)
    def load_gguf_checkpoint(path: Any, return_tensors: bool = False, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(path, return_tensors, *args, **kwargs)
        except TypeError:  # of every gpt-oss file that has a factor of RoPE, whose length is read for its value
            if return_tensors:
                raise
            return {"config": config_dict(gguf.read_header(path))}

    return load_gguf_checkpoint


def _packed_quantizer(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`get_hf_quantizer` as it was, but for loads that are ours."""

    @wraps(stock)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        gguf_file = kwargs.get("gguf_file")
        ours = _ours(config, quantization_config)
        if ours is None and quantization_config is None and _takeover.enabled and _holds_mxfp4(config, gguf_file):
            ours = MXFP4Config()
        if ours is None:
            return stock(config, quantization_config, *args, **kwargs)
        if gguf_file is not None:  # which stock refuses beside a method of another name
            quantizer, *rest = stock(config, ours, *args, **{**kwargs, "gguf_file": None})
            quantizer.gguf_config = config
            return quantizer, *rest
        if ours.stored is None:
            return stock(config, ours, *args, **kwargs)
        config.quantization_config = ours  # the other two wrappers let it pass
        return stock(config, None, *args, **kwargs)

    return get_hf_quantizer


def install() -> None:
    """Registers the method and wraps the functions, once a process."""
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = MXFP4HfQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MXFP4Config
    loader = auto.AutoHfQuantizer
    if getattr(loader.merge_quantization_configs, "_is_hf_mxfp4", False):
        return
    stock_merge = loader.merge_quantization_configs
    stock_supports = loader.supports_quant_method

    def merge_quantization_configs(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config, MXFP4Config):
            return quantization_config
        return stock_merge(quantization_config, quantization_config_from_args)

    def supports_quant_method(quantization_config_dict: Any) -> bool:
        return isinstance(quantization_config_dict, MXFP4Config) or bool(stock_supports(quantization_config_dict))

    merge_quantization_configs._is_hf_mxfp4 = True  # type: ignore[attr-defined]
    loader.merge_quantization_configs = classmethod(merge_quantization_configs)
    loader.supports_quant_method = staticmethod(supports_quant_method)
    auto.get_hf_quantizer = modeling_utils.get_hf_quantizer = _packed_quantizer(auto.get_hf_quantizer)
    PreTrainedModel.save_pretrained = _packed_save(PreTrainedModel.save_pretrained)
    read_gguf = _gguf_config(modeling_gguf_pytorch_utils.load_gguf_checkpoint)
    for module in (modeling_gguf_pytorch_utils, configuration_utils):  # older versions have it in both
        if hasattr(module, "load_gguf_checkpoint"):
            module.load_gguf_checkpoint = read_gguf

"""MXFP4Config: what a user asks for, and what a saved folder says of itself.

In memory the method is "hf_mxfp4". A saved folder carries the config of the layout that it is written in (`mxfp4`,
`compressed-tensors` and so on), so that other software reads it as it reads any such folder, with one key more,
`hf_mxfp4`, that this software knows and others pass over.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import mxfp4
from ..backends import BACKENDS
from ..formats import DIALECTS, CheckpointError, Dialect, claimed, named_formats, per_expert
from ..packed import ACTIVATIONS

logger = logging.get_logger(__name__)

METHOD = "hf_mxfp4"
MARKER = "hf_mxfp4"
SAVE_FORMATS = ("auto", *(row.name for row in DIALECTS if row.encode is not None))

DEFAULT_CACHE = 1 << 30

_STORED_OPTIONS = ("scale_rule", "ties", "modules_to_not_convert")


class MXFP4Config(QuantizationConfigMixin):  # type: ignore[misc]  # Transformers has no type marker
    """Keeps the experts of a MoE model in MXFP4.

    Dense experts are quantized as they load; experts that a checkpoint holds in MXFP4, in any dialect of `formats`,
    are kept byte for byte, whatever method the checkpoint's own config names.
    """

    def __init__(
        self,
        scale_rule: mxfp4.ScaleRule = "mse",
        ties: mxfp4.Ties = "even",
        modules_to_not_convert: list[str] | None = None,
        dequantize: bool = False,
        backend: str = "auto",
        save_format: str = "auto",
        requantize: bool = False,
        activation: str = "auto",
        expert_cache_bytes: int = DEFAULT_CACHE,
        **unknown: Any,
    ) -> None:
        """Checks and keeps the options.

        Args:
            scale_rule: how dense weights get their scales, see `mxfp4.quantize`.
            ties: where weights halfway between two values go, see `mxfp4.quantize`.
            modules_to_not_convert: names, prefixes or regular expressions of experts modules that stay dense.
            dequantize: load packed experts as dense ones, into the model's stock classes.
            backend: what runs packed experts, see `backends.choose`.
            save_format: the layout that `save_pretrained` writes: one of `formats`' dialects that can be written, or
                "auto": gpt-oss for gpt-oss models, compressed-tensors for models whose files hold one tensor an expert,
                hf_mxfp4 for the rest.
            requantize: load experts that a checkpoint holds in NVFP4 or Q4_K, which loses precision: they are decoded
                and quantized anew. `packed_report` states the error that this added.
            activation: "int8" rounds activations to 8 bits and a step for each 32 before they are multiplied; "auto"
                keeps them in bfloat16 or float32, whichever tokens have.
            expert_cache_bytes: memory for experts that a device map has put on disk, see `stream_experts`.
            unknown: anything else, refused.

        Raises:
            TypeError: an option that does not exist.
            ValueError: an option's value that does not.
        """
        if unknown:
            options = ", ".join(list(inspect.signature(MXFP4Config.__init__).parameters)[1:-1])
            raise TypeError(f"MXFP4Config has no option {', '.join(map(repr, unknown))}; its options are {options}")
        mxfp4.check_options(scale_rule, ties)
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend is {backend!r}; expected auto, {', '.join(BACKENDS)}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        if save_format not in SAVE_FORMATS:
            raise ValueError(f"save_format is {save_format!r}; expected {', '.join(SAVE_FORMATS)}")
        for name, value in (("dequantize", dequantize), ("requantize", requantize)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; expected True or False")
        if type(expert_cache_bytes) is not int or expert_cache_bytes < 0:
            raise ValueError(f"expert_cache_bytes is {expert_cache_bytes!r}; expected a number of bytes")
        _check_patterns(modules_to_not_convert)
        self.quant_method = METHOD
        self.scale_rule = scale_rule
        self.ties = ties
        self.modules_to_not_convert = modules_to_not_convert
        self.dequantize = dequantize
        self.backend = backend
        self.save_format = save_format
        self.requantize = requantize
        self.activation = activation
        self.expert_cache_bytes = expert_cache_bytes
        self._stored: dict[str, Any] | None = None
        self._written: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config from a plain dictionary of options, as Transformers calls it."""
        options = {key: value for key, value in config_dict.items() if key != "quant_method"}
        return super().from_dict(options, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> MXFP4Config:
        """The config for a checkpoint whose own `quantization_config` is `stored`, ours or another's."""
        if stored.get("quant_method") == METHOD:  # options, written by hand or by `to_dict` before a load
            config: MXFP4Config = cls.from_dict({key: value for key, value in stored.items() if key != MARKER})
            return config
        marker = stored.get(MARKER)
        marker = marker if isinstance(marker, Mapping) else {}
        known = {"scale_rule": mxfp4.SCALE_RULES, "ties": mxfp4.TIES}
        options = {key: marker[key] for key in _STORED_OPTIONS if marker.get(key) is not None}
        # A rule of a later version says how bytes were made, which reading them does not need.
        config = cls(**{key: value for key, value in options.items() if key not in known or value in known[key]})
        if marker.get("format") in SAVE_FORMATS:
            config.save_format = marker["format"]
        config._stored = dict(stored)
        return config

    def check_stored(self, dialect: Dialect | None) -> None:
        """Raises CheckpointError if the checkpoint's own config names MXFP4-like weights that are not MXFP4.

        Args:
            dialect: that its experts are in.
        """
        stored = self._stored or {}
        marker = stored.get(MARKER)
        named = marker.get("format") if isinstance(marker, Mapping) else None
        if named is not None and named not in {row.name for row in DIALECTS}:
            raise CheckpointError(f"the checkpoint's layout is {named!r}, which this version of hf_mxfp4 does not know")
        if dialect is not None and dialect.is_lossy:
            return
        if stored.get("quant_method") != per_expert.COMPRESSED_TENSORS.name:
            names = named_formats(stored)
            if dialect is not None and names and not any(row.claims(stored) for row in DIALECTS):
                raise CheckpointError(
                    f"the checkpoint's config calls its format {', '.join(names)}, which this version does not know"
                )
            return
        if per_expert.FORMAT not in per_expert.formats(stored):
            formats = sorted({str(name) for name in per_expert.formats(stored) if name})
            raise CheckpointError(f"the checkpoint's format is {', '.join(formats)}, not {per_expert.FORMAT}")
        for name, group in per_expert.groups(stored).items():
            weights = group.get("weights") or {}
            if group.get("format", per_expert.FORMAT) != per_expert.FORMAT or not isinstance(weights, Mapping):
                continue
            found = {key: weights.get(key) for key in ("num_bits", "group_size")}
            if found != {"num_bits": 4, "group_size": mxfp4.BLOCK_SIZE}:
                raise CheckpointError(
                    f"{name} of the checkpoint's config says {found}; MXFP4 has 4 bits and groups of 32"
                )
        if str(stored.get("version", "")).startswith("0.13.0"):
            logger.warning(
                "hf_mxfp4: this checkpoint was written by compressed-tensors 0.13.0, which stored MXFP4 scales two"
                " powers of two too low; compare its weights with another source before use"
            )

    def loading(self, stored: Mapping[str, Any]) -> MXFP4Config:
        """This config for a checkpoint whose own `quantization_config` is `stored`.

        What describes the checkpoint comes from it, what describes the load comes from here.
        """
        merged = copy.deepcopy(self)
        described = MXFP4Config.from_stored(stored)
        merged._stored = described._stored
        if is_marked(stored):
            merged.scale_rule, merged.ties = described.scale_rule, described.ties
        if merged.save_format == "auto":
            merged.save_format = described.save_format
        if merged.modules_to_not_convert is None:
            merged.modules_to_not_convert = described.modules_to_not_convert
        return merged

    @property
    def stored(self) -> dict[str, Any] | None:
        """The checkpoint's own config, None for a checkpoint without one."""
        return self._stored

    @property
    def stored_method(self) -> str | None:
        """The method that the checkpoint's own config names, None for a checkpoint without one."""
        return None if self._stored is None else str(self._stored.get("quant_method"))

    def write_as(self, dialect: Dialect, dense: list[str], *, as_stored: bool) -> None:
        """From now on `to_dict` is the config of a folder written in `dialect`.

        Args:
            dialect: of its experts.
            dense: the names of linear layers beside experts, none of which is packed.
            as_stored: the checkpoint's own config describes these layers too, and is kept if it is of this dialect.
        """
        self._written = {
            **written_config(dialect, dense, self._stored if as_stored else None, self.modules_to_not_convert),
            MARKER: {"format": dialect.name, **{key: getattr(self, key) for key in _STORED_OPTIONS}},
        }

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json after a load; before it, the method and the options."""
        if self._written is not None:
            return copy.deepcopy(self._written)
        return copy.deepcopy({key: value for key, value in self.__dict__.items() if not key.startswith("_")})


def written_config(
    dialect: Dialect, dense: list[str], stored: Mapping[str, Any] | None, left_dense: list[str] | None
) -> dict[str, Any]:
    """The `quantization_config` of a folder whose experts are in a dialect, without this software's marker.

    Args:
        dialect: of its experts.
        dense: the names of linear layers beside experts, none of which is packed.
        stored: the config that the checkpoint came with, which is kept if it is of this dialect.
        left_dense: experts that are not packed, see `MXFP4Config`.
    """
    if stored is None or not dialect.claims(stored):
        written = dialect.config(dense)
        if "modules_to_not_convert" in written:
            written["modules_to_not_convert"] = written["modules_to_not_convert"] or left_dense
        return written
    written = {key: value for key, value in copy.deepcopy(dict(stored)).items() if key != MARKER}
    if dialect is per_expert.COMPRESSED_TENSORS:
        # Layers that are dense and not named, as in Kimi K3's config, are read as packed by others.
        ignored = list(written.get("ignore") or [])
        written["ignore"] = ignored + [name for name in dense if not per_expert.is_ignored(name, written)]
    return written


def is_marked(stored: Any) -> bool:
    """Whether a checkpoint's `quantization_config` says that this software wrote it."""
    return isinstance(stored, Mapping) and (MARKER in stored or stored.get("quant_method") == METHOD)


def names_mxfp4(stored: Any) -> bool:
    """Whether a checkpoint's `quantization_config` names MXFP4 weights, in this software's dialects."""
    return claimed(stored) is not None


def _check_patterns(patterns: Any) -> None:
    """Raises unless `modules_to_not_convert` is None or a list of names or regular expressions."""
    if patterns is None:
        return
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"modules_to_not_convert is {patterns!r}; expected a list of names or regular expressions")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"modules_to_not_convert holds {pattern!r}, which is no regular expression: {error}"
            ) from error

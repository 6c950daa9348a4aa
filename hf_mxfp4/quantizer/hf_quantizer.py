"""MXFP4HfQuantizer: the hooks through which Transformers' `from_pretrained` makes and fills packed experts.

Order of events in a load: the model is built on meta; `_process_model_before_weight_loading` looks at the checkpoint's
headers and swaps experts modules; `update_weight_conversions` points the loader's conversions at packed parameters;
the loader fills them; `_process_model_after_weight_loading` checks that nothing was left out and prepares saving.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, ClassVar

import torch
from accelerate.hooks import add_hook_to_module
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightTransform
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from ..experts import MXFP4Experts, find_experts
from ..families import PROJECTIONS, expert_lists, layout_of, projections, unpackable
from ..formats import (
    CheckpointError,
    Found,
    TensorInfo,
    detect,
    float_dtypes,
    is_activation_scale,
    read_headers,
    split,
    stacked,
)
from ..formats import gguf as layout
from ..linear import MXFP4Linear
from ..packed import PackedModule
from . import gguf, parallel, plan, ties
from .config import MXFP4Config, names_mxfp4
from .streaming import stream_experts
from .task import Task, TaskConverter, read_flat

logger = logging.get_logger(__name__)

_READS_STORED_DTYPES = hasattr(HfQuantizer, "get_new_dtype")
"""Transformers since 5.21 asks which tensors to read in the dtype that they are stored in. Before, it cast floating
point tensors to the model's dtype, but for those of packed checkpoints whose names change as they load."""

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class MXFP4HfQuantizer(HfQuantizer):  # type: ignore[misc]  # Transformers has no type marker
    """Loads, quantizes and saves models whose experts are `MXFP4Experts`."""

    requires_calibration = False
    serialized_names: ClassVar[dict[str, list[str]]] = {
        proj: [f"{proj}_blocks", f"{proj}_scales"] for proj in PROJECTIONS
    }

    def __init__(self, quantization_config: MXFP4Config, **kwargs: Any) -> None:
        """Takes a copy of the config, which is never changed; see `HfQuantizer` for the rest."""
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self._task: Task | None = None
        self._loading: list[WeightTransform] = []
        self._saving: list[WeightTransform] = []
        self._config: Any = None
        self._dtype = torch.float32
        self._left_dense = self._write_mlx = False
        self._dense_layers: list[str] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._found = Found(None, [], {}, {}, {})
        self._device_map: dict[str, Any] = {}
        self._gguf: layout.GGUFHeader | None = None
        self.gguf_config: Any = None
        """The model's config, where it is made from a GGUF file."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Nothing is needed. Transformers also gives the device map here, as soon as it has one."""
        if isinstance(device_map, dict):
            self._device_map |= device_map

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: list[str] | None = None,
        use_kernels: bool = False,
        **kwargs: Any,
    ) -> None:
        config = self.quantization_config
        tensors = read_headers(checkpoint_files or ()) if self._gguf is None else layout.tensor_infos(self._gguf)
        found = self._detect(tensors)
        dialect = found.dialect
        parallel.check_checkpoint(model, dialect, self._gguf is not None)
        self.pre_quantized = dialect is not None
        experts = {**dict(find_experts(model)), **dict(_listed_linears(model))}
        converted = self._to_convert(model, experts)
        if config.dequantize:  # dense classes are filled as they are, but for flat ones
            flat = {name: module for name, module in experts.items() if _is_flat(module)}
            converted = flat if dialect is not None else {}
        self._refuse_kernels(model, converted, use_kernels)
        self._config, self._dtype = model.config, kwargs.get("dtype") or model.dtype
        self._dtypes = {} if _READS_STORED_DTYPES else _planned_dtypes(model, self._dtype)
        self._left_dense = len(converted) < len(experts)
        self._dense_layers = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in converted
        ]
        self._found = found
        self._task = Task(dialect, (config.scale_rule, config.ties), {}, set(), [], {}, self._device_map)
        prefix = f"{model.base_model_prefix}."
        packed = self._swap(model, converted, None if dialect else _placeholder_dtype(float_dtypes(tensors)))
        for name, module in experts.items():
            if name not in packed and (dialect is None or isinstance(module, nn.Linear)):
                continue  # filled by the model's own conversions, or decoded as any other layer
            held = packed.get(name, module)
            for proj in held.projection_names if isinstance(held, PackedModule) else projections(held):
                full = f"{name}.{proj}"
                loaded = f"{full}_blocks" if name in packed else full
                for target in (loaded, f"{full}_bias"):
                    for alias in (target, target.removeprefix(prefix), prefix + target):
                        self._task.targets[alias] = (held, full)

    def _detect(self, tensors: Mapping[str, TensorInfo]) -> Found:
        """How the checkpoint holds its experts; CheckpointError if that is nothing that this version reads."""
        config = self.quantization_config
        found = detect(tensors, config.stored) if self._gguf is None else layout.detect(self._gguf)
        dialect = found.dialect
        config.check_stored(dialect)
        if dialect is not None and dialect.is_lossy and not config.requantize and not config.dequantize:
            raise CheckpointError(
                f"the checkpoint's experts are in {dialect.name}, which MXFP4 holds only with a loss; pass"
                " MXFP4Config(requantize=True) to round them anew (packed_report states the error that this adds)"
            )
        if any(info.dtype == "F4" for info in tensors.values()):
            raise CheckpointError(
                "the checkpoint stores codes as F4, of which Transformers' loader cannot read parts; `hf-mxfp4 convert`"
                " makes a checkpoint of bytes of it"
            )
        if dialect is None and names_mxfp4(config._stored) and not tensors:
            raise CheckpointError(
                f"the checkpoint's config says {config.stored_method} with MXFP4 weights, which are read from"
                " safetensors files only"
            )
        if dialect is None and names_mxfp4(config._stored):
            raise CheckpointError(
                f"the checkpoint's config says {config.stored_method} with MXFP4 weights, but its files hold no packed"
                " experts"
            )
        if dialect is None and config._stored is not None:
            raise CheckpointError(
                f"the checkpoint is quantized as {config.stored_method}, which this version does not load into MXFP4;"
                " load a dense checkpoint, or this one without MXFP4Config"
            )
        if self._gguf is not None:
            return found
        cast = next((i.dtype for i in tensors.values() if i.dtype in ("F8_E8M0", "F8_E4M3")), None)
        if cast is not None and not _READS_STORED_DTYPES:
            raise CheckpointError(
                f"the checkpoint stores tensors as {cast}, which Transformers before 5.21 casts to other values"
            )
        _tell_of_decoded_layers(found)
        return found

    def _to_convert(self, model: Any, experts: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """The experts modules that the config does not leave out; ValueError if there are none."""
        skip = self.quantization_config.modules_to_not_convert
        converted = {name: module for name, module in experts.items() if should_convert_module(name, skip)}
        if not converted and not self.quantization_config.dequantize:
            others = unpackable(model)
            hint = f" outside modules_to_not_convert = {skip}" if experts else ""
            hint = f"; its {', '.join(others)} cannot be packed" if others and not experts else hint
            raise ValueError(f"{type(model).__name__} has no experts to keep in MXFP4{hint}")
        for pattern in skip or ():
            if not any(not should_convert_module(name, [pattern]) for name, _ in model.named_modules()):
                logger.warning(f"hf_mxfp4: {pattern!r} in modules_to_not_convert matches no module of this model")
        return converted

    def _swap(
        self, model: nn.Module, dense: dict[str, nn.Module], placeholder: torch.dtype | None
    ) -> dict[str, PackedModule]:
        """Puts packed modules in the place of dense ones.

        While dense experts load, packed parameters stand on meta in the checkpoint's float dtype, `placeholder`: the
        loader casts what it reads to the dtype of the parameter, and so reads experts as they are.
        """
        swapped: dict[str, PackedModule] = {}
        for name, module in dense.items():
            config = self.quantization_config
            packed: PackedModule
            if isinstance(module, nn.Linear):
                packed = MXFP4Linear(module, name=name, backend=config.backend, activation=config.activation)
            else:
                packed = MXFP4Experts(module, name=name, backend=config.backend, activation=config.activation)
            if placeholder is not None:
                for proj in packed.projection_names:
                    for suffix in ("_blocks", "_scales"):
                        stand_in = packed.get_parameter(proj + suffix).to(placeholder)
                        packed.register_parameter(proj + suffix, nn.Parameter(stand_in, requires_grad=False))
            model.set_submodule(name, packed)
            swapped[name] = packed
        ties.retie(model)
        for own in (getattr(model, "_tp_plan", None), getattr(model, "_ep_plan", None)):
            parallel.update_plan(model, own or {})
        return swapped

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """Nothing more: plans are made for packed parameters when these are, also for older versions."""

    def _refuse_kernels(self, model: nn.Module, dense: dict[str, nn.Module], use_kernels: bool) -> None:
        if not use_kernels:
            return
        for name, module in dense.items():
            if isinstance(module, nn.Linear):
                continue
            block = model.get_submodule(name.rpartition(".")[0])
            if hasattr(type(block), "kernel_layer_name"):
                raise ValueError(
                    f"use_kernels=True replaces the forward of {type(block).__name__}, which reads dense experts;"
                    " load with use_kernels=False to keep them in MXFP4"
                )

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: nn.Module | None = None
    ) -> list[WeightTransform]:
        """Points the loader at packed parameters.

        Args:
            weight_conversions: the model's own.
            model: not needed, and not given by older versions of Transformers.

        Returns:
            Converters for packed projections before the model's own, which stay for experts that are not converted.
        """
        task = self._task
        assert task is not None
        if any(isinstance(module, PackedModule) for module, _ in task.targets.values()):
            wanted = plan.Wanted(self.quantization_config.save_format, self._config.model_type, self._left_dense)
            dialect, self._saving = plan.for_saving(task, weight_conversions, wanted)
            as_stored = not (self._found.layers or self._found.fp8 or self._found.affine)
            self.quantization_config.write_as(dialect, self._dense_layers, as_stored=as_stored)
            self._write_mlx = dialect is split.MLX
        own = list(weight_conversions)
        self._loading = plan.for_loading(task, self._found, own, self._block(), self._gguf is not None)
        if self._gguf is not None and (newer := gguf.newer_conversions(self._gguf, self._config, self._dtype)):
            self._loading, own = self._loading + newer, []  # the model's own are for other files
        return self._loading + own

    def _block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale in FP8 layers, where the checkpoint's config says so."""
        size = (self.quantization_config.stored or {}).get("weight_block_size")
        return tuple(size) if isinstance(size, list) and len(size) == 2 else None

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        task, config = self._task, self.quantization_config
        assert task is not None
        self._check_filled(model, task)
        for name, parameter in model.named_parameters():
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.dtype != wanted and not parameter.is_meta:
                parameter.data = parameter.data.to(wanted)
        if config.dequantize:
            self._dequantize(model)
            self.remove_quantization_config(model)
        else:
            # What was loaded by our own converters is not what is saved: packed projections have conversions of theirs.
            ours = {id(conversion) for conversion in self._loading}
            used = [c for c in getattr(model, "_weight_conversions", []) if id(c) not in ours]
            if not any(projections(module) for module in model.modules()):
                # Older versions of Transformers would apply a dense projection's renaming to packed ones.
                used = [c for c in used if isinstance(c, WeightConverter) or not _fills(c, task)]
            model._weight_conversions = used + self._saving
            # MLX looks for its config by another name; of a checkpoint that came from there it would be out of date.
            model.config.__dict__.pop("quantization", None)
            if self._write_mlx:
                model.config.quantization = config.to_dict()
            if task.dialect is stacked.GPT_OSS:
                read_flat(model, task)
            stream_experts(model, config.expert_cache_bytes)
            packed = next(module for module in model.modules() if isinstance(module, PackedModule))
            device = next(packed.parameters()).device.type
            choice = packed.backend_choice("cpu" if device == "meta" else device)
            logger.info(f"hf_mxfp4: packed experts run on {choice.name} ({choice.reason})")
        self._task, self._gguf, self.gguf_config = None, None, None
        self._loading, self._found = [], Found(None, [], {}, {}, {})

    def _check_filled(self, model: Any, task: Task) -> None:
        """Raises unless every parameter of the experts came from the checkpoint."""
        packed = {full for module, full in task.targets.values() if isinstance(module, PackedModule)}
        expected = {full + suffix for full in packed for suffix in ("_blocks", "_scales")}
        lost = sorted(expected - task.filled - model.all_tied_weights_keys.keys())
        report = task.reports[0] if task.reports else None
        if report is not None:
            owners = {name for name, _ in find_experts(model)} | {name for name, _ in _lists(model)}
            blocks = {owner.rpartition(".")[0] for owner in owners} - {""}
            parameters = {name for name, _ in model.named_parameters()}
            lost += sorted(key for key in parameters & set(report.missing_keys) - set(lost) if _is_under(key, blocks))
            unexpected = [key for key in report.unexpected_keys if not is_activation_scale(key)]
            surplus = sorted(key for key in unexpected if _is_under(key, owners))
            if surplus and not lost:
                raise CheckpointError(f"the checkpoint holds experts that the model has no room for: {surplus[0]}")
        if not lost:
            return
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        unused = sorted(report.unexpected_keys)[:4] if report is not None else []
        hint = f"; the checkpoint holds tensors that fit nothing, such as {', '.join(unused)}" if unused else ""
        raise CheckpointError(f"missing from the checkpoint: {', '.join(lost[:4])}{more}{hint}")

    def read_header(self, gguf_file: str) -> None:
        """Reads what a GGUF file says of itself. Called by Transformers before it makes the model."""
        self._gguf = layout.read_header(gguf_file)
        if not gguf.is_newer(self._gguf):
            gguf.fix_config(self.gguf_config, self._gguf)

    def get_state_dict(self, gguf_file: str, model: Any) -> dict[str, gguf.LazyTensor]:
        """The tensors of a GGUF file by the names of the model's parameters, experts as they are."""
        assert self._gguf is not None
        return gguf.state_dict(self._gguf, model)

    def get_weight_conversions(self) -> list[WeightTransform]:
        """None beside those of `update_weight_conversions`."""
        return []

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Packed bytes and scale bytes are read as they are: a cast of float8_e8m0fnu would be one of values."""
        as_stored = _loads_packed(converter) or (self._gguf is not None and gguf.is_newer(self._gguf))
        return None if as_stored else super().get_new_dtype(converter, param, dtype)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Bytes an element, for device maps: one for packed parameters, whatever stands in for them on meta."""
        module, _, name = param_name.rpartition(".")
        if name.endswith(("_blocks", "_scales")) and isinstance(model.get_submodule(module), PackedModule):
            return 1
        return float(super().param_element_size(model, param_name, param))

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        resolved: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a name after a save
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedModule):
                dense = module.dequantize(resolved)
                if (hook := getattr(module, "_hf_hook", None)) is not None:
                    add_hook_to_module(dense, hook)
                model.set_submodule(name, dense)
        ties.untie(model)
        return model

    def remove_quantization_config(self, model: nn.Module) -> None:
        """Leaves a stock model, which saves under the names of its source."""
        model.__dict__.setdefault("_weight_conversions", None)
        super().remove_quantization_config(model)
        model.__dict__.pop("_weight_conversions", None)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Yes: `save_pretrained` writes packed experts."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Yes: gradients pass through packed experts, to adapters and the rest of the model."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Yes: the forward is made of ops that torch.compile knows."""
        return True


def _planned_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that each floating point parameter is to have after a load in `dtype`, by name."""
    kept: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    parameters = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    return {
        name: next((wanted for pattern, wanted in kept.items() if re.search(pattern, name)), own)
        for name, own in parameters.items()
    }


def _tell_of_decoded_layers(found: Found) -> None:
    """Logs how many layers beside the experts are of few bits in the checkpoint and will be dense in the model."""
    packed = next(iter(found.layers.values())).name if found.layers else ""
    kinds: tuple[tuple[Mapping[str, Any], str], ...] = ((found.layers, packed), (found.fp8, "FP8"))
    for names, what in (*kinds, (found.affine, "MLX's affine format")):
        if names:
            logger.warning(
                f"hf_mxfp4: {len(names)} layers beside the experts are stored as {what}, such as {next(iter(names))};"
                " they are decoded to dense weights"
            )


def _is_flat(module: nn.Module) -> bool:
    layout = layout_of(module)
    return layout is not None and layout.is_flat


def _fills(conversion: WeightTransform, task: Task) -> bool:
    """Whether a conversion fills a projection of the load."""
    return any(full.endswith(conversion.target_patterns[0]) for _, full in task.targets.values())


def _loads_packed(conversion: WeightTransform) -> bool:
    """Whether a conversion is one of ours for loading, which saving has no use for."""
    return isinstance(conversion, TaskConverter)


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    return expert_lists(model, nn.Linear, MXFP4Linear)


def _is_under(key: str, owners: set[str]) -> bool:
    """Whether a parameter belongs to one of the modules."""
    parts = key.split(".")
    return any(".".join(parts[:i]) in owners for i in range(1, len(parts)))


def _listed_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of experts that are lists of small MLPs, by name."""
    for name, experts in expert_lists(model, nn.Linear):
        for inner, module in experts.named_modules():
            if isinstance(module, nn.Linear):
                yield f"{name}.{inner}", module


def _placeholder_dtype(dtypes: set[str]) -> torch.dtype:
    """The narrowest dtype that holds what a checkpoint holds; float32 if that is not known."""
    if not dtypes or "F64" in dtypes:
        return torch.float32
    return reduce(torch.promote_types, (_TORCH_DTYPES[name] for name in dtypes))

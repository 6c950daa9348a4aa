"""PEFT's LoRA as it is, on models with packed weights.

PEFT adapts a class's 3-D parameters by `LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...])`, adding the
product of B and A to the whole dense parameter in each forward. Packed experts have no such parameter, so `install`
wraps what PEFT's `LoraModel` does to a model: while it looks for parameters, experts show stand-ins on meta with the
dense names and shapes, and what it makes for packed modules are the layers of `adapters`. It and this module are the
ones that know PEFT; they are imported when PEFT is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.utils import logging

from ..experts import MXFP4Experts
from ..linear import MXFP4Linear
from ..packed import PackedModule, Source
from .adapters import PARTS, ExpertsAdapter, LinearAdapter, OnPacked

logger = logging.get_logger(__name__)


def install() -> None:
    """Wraps what PEFT's LoRA does to a model, so that it adapts packed weights; other models see no difference."""
    LoraModel.inject_adapter = _injecting(LoraModel.inject_adapter)
    LoraModel._create_new_module = staticmethod(_creating(LoraModel._create_new_module))
    LoraModel._replace_module = _placing(LoraModel._replace_module)
    for name in ("_unload_and_optionally_merge", "merge_adapter"):
        setattr(LoraModel, name, _telling(getattr(LoraModel, name)))


def _injecting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`inject_adapter` that finds the projections of packed experts."""

    @wraps(stock)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
        if not packed:
            return stock(self, model, adapter_name, *args, **kwargs)
        config: Any = self.peft_config[adapter_name]
        _check_targets(getattr(config, "target_parameters", None) or (), model, packed)
        for whole in getattr(config, "modules_to_save", None) or ():
            if name := next((name for name in packed if f".{whole}." in f".{name}."), None):
                raise ValueError(f"modules_to_save has {whole!r}, which holds {name}; packed weights cannot be trained")
        with _stand_ins([module for module in packed.values() if isinstance(module, MXFP4Experts)]):
            result = stock(self, model, adapter_name, *args, **kwargs)
        ours: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
        if hasattr(ours, "scale_rule"):
            for layer in model.modules():
                if isinstance(layer, OnPacked):
                    layer.rules = (ours.scale_rule, ours.ties)
        return result

    return inject_adapter


def _creating(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_create_new_module` that makes our layers for packed modules."""

    @wraps(stock)
    def create(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, MXFP4Experts) and kwargs.get("parameter_name") is not None:
            return ExpertsAdapter(target, adapter_name, config=lora_config, **kwargs)
        if isinstance(base, MXFP4Linear):
            return LinearAdapter(target, adapter_name, config=lora_config, **kwargs)
        return stock(lora_config, adapter_name, target, **kwargs)

    return create


def _placing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_replace_module` that leaves our layers where they are: PEFT would move them to what stands for their weight."""

    @wraps(stock)
    def replace(self: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if isinstance(new_module, OnPacked):
            setattr(parent, child_name, new_module)
        else:
            stock(self, parent, child_name, new_module, child)

    return replace


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A method that may merge adapters, and tells what rounding did to them."""

    @wraps(stock)
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [layer for layer in self.model.modules() if isinstance(layer, OnPacked)]
        before = [layer.rounding for layer in layers]
        result = stock(self, *args, **kwargs)
        done = [layer for layer, was in zip(layers, before, strict=True) if layer.rounding is not was]
        _note_losses(done)
        if done:
            error, delta = _errors([layer.rounding for layer in done])
            logger.warning(
                f"hf_mxfp4: {len(done)} packed weights with adapters merged into them were rounded to MXFP4 again:"
                f" relative error {error:.1e} of the weights, {delta:.2f} of what the adapters add;"
                " call model.dequantize() before merging to keep it whole, in dense weights"
            )
        return result

    return merge


def _errors(roundings: list[Any]) -> tuple[float, float]:
    """The error of rounding, over the norm of the weights and over the norm of what adapters added."""
    error, weights, delta = (sum(column) ** 0.5 for column in zip(*roundings, strict=True))
    return (error / weights if weights else 0.0), (error / delta if delta else 0.0)


def _note_losses(layers: list[OnPacked]) -> None:
    """Says of each packed module what was merged into it, in its `source`."""
    by_base: dict[Any, list[OnPacked]] = {}
    for layer in layers:
        by_base.setdefault(layer.get_base_layer(), []).append(layer)
    for base, merged in by_base.items():
        (rule, ties), before = merged[0].rules, merged[0].before
        assert before is not None
        was = before[1] or Source("-", (), "-")
        loss = max(_errors([layer.rounding for layer in merged])[0], was.loss or 0.0)
        done = f"merged with {', '.join(merged[0].merged_adapters)} and requantized: {rule}, ties {ties}"
        base.source = was._replace(conversion=f"{was.conversion}, {done}; relative error {loss:.1e}", loss=loss)


@contextmanager
def _stand_ins(modules: list[MXFP4Experts]) -> Iterator[None]:
    """Gives packed experts parameters by their dense names, on meta, for as long as PEFT looks for parameters."""
    modules = [module for module in modules if not module.layout.is_flat]
    for module in modules:
        for proj in module.projection_names:
            module._parameters[proj] = module._stand_in(proj)
    try:
        yield
    finally:
        for module in modules:
            for proj in module.projection_names:
                module._parameters.pop(proj, None)


def _check_targets(targets: Any, model: nn.Module, packed: dict[str, PackedModule]) -> None:
    """ValueError for targets that are packed bytes, or that name packed modules and match nothing in them."""
    names = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
    owners = {name.replace(".base_layer", ""): module for name, module in packed.items()}
    there = {
        f"{name}.{proj}": [f"{name}.{proj}_{part}" for part in PARTS]
        for name, module in owners.items()
        for proj in module.projection_names
    }
    can = [
        name
        for name in there
        if isinstance(m := owners[name.rpartition(".")[0]], MXFP4Experts) and not m.layout.is_flat
    ]
    for target in targets:
        for name, parts in there.items():
            if any(_matches(part, target) for part in parts):
                raise ValueError(
                    f"target_parameters has {target!r}, which are packed bytes, to which nothing can be added; name"
                    f" {name.rpartition('.')[2]!r} for an adapter beside them"
                )
        if any(_matches(name, target) for name in (*can, *names)):
            continue
        if {owner.rpartition(".")[2] for owner in owners} & set(target.split(".")):
            what = f"can be adapted are such as {can[0]!r}" if can else "can be adapted: none"
            raise ValueError(
                f"target_parameters has {target!r}, which is no parameter of the model; of packed experts {what}"
            )


def _matches(name: str, target: str) -> bool:
    """Whether PEFT takes a parameter for a target."""
    return name == target or name.endswith(f".{target}")

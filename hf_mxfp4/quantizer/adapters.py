"""LoRA on packed weights, through PEFT as it is: the one module that knows PEFT, imported when PEFT is.

PEFT adapts a class's 3-D parameters by `LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...])`, adding the
product of B and A to the whole dense parameter in each forward. Packed experts have no such parameter, so `install`
wraps what PEFT's `LoraModel` does to a model: while it looks for parameters, experts show stand-ins on meta with the
dense names and shapes, and what it makes for them is `ExpertsAdapter`, which adds scaling * B (A x) to the packed
product for each slot. Names and shapes of A and B are PEFT's own, so that adapters of dense models fit packed ones and
the other way round. E experts, S slots, N output features, K input features, r the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear, LoraLayer, ParamWrapper
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers.utils import logging

from .. import mxfp4, ops, routing
from ..experts import MXFP4Experts
from ..linear import MXFP4Linear
from ..packed import PackedModule, Source, shard_of
from .streaming import StreamingHook

logger = logging.get_logger(__name__)

_PARTS = ("blocks", "scales")
_INITS = (True, False, "gaussian")
_REFUSED = ("use_dora", "lora_bias", "fan_in_fan_out")
_SMALL_TILE, _LARGE_TILE = 16, 64


class Rounding(NamedTuple):
    """What rounding merged weights to MXFP4 did: squares, summed.

    Attributes:
        error: of the difference between merged weights and what is held of them.
        weights: of merged weights.
        delta: of what adapters added.
    """

    error: float
    weights: float
    delta: float


class _OnPacked:
    """What adapters on packed weights have in common; a base class before PEFT's layer."""

    rules: tuple[mxfp4.ScaleRule, mxfp4.Ties] = ("mse", "even")
    """How merged weights are rounded: scale rule and ties."""

    rounding: Rounding | None = None
    before: tuple[mxfp4.MXFP4Tensor, Source | None] | None = None
    """What was held before adapters were merged."""

    get_base_layer: Callable[[], nn.Module]
    merged_adapters: list[str]
    lora_A: Any
    lora_B: Any

    def packed_base(self) -> Any:
        """The packed module below; None once it was dequantized."""
        base = self.get_base_layer()
        return base if isinstance(base, PackedModule) else None

    def weight_name(self) -> str:
        """The name of the weight that is adapted."""
        raise NotImplementedError

    def delta(self, adapter: str, expert: int) -> Tensor:
        """What an adapter adds to an expert's weight, float32 [N, K]."""
        raise NotImplementedError

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        """As PEFT's; ValueError for what packed weights cannot have."""
        base = self.packed_base()
        if base is not None:
            blocks, where = base.get_parameter(f"{self.weight_name()}_blocks"), type(base).__name__
            if shard_of(blocks)[1]:
                raise ValueError(f"LoRA on {where} that is split over processes is not supported")
            if blocks.is_meta:
                raise ValueError(f"LoRA on {where} that is offloaded is not supported; load it without offloading")
            if config.init_lora_weights not in _INITS:
                raise ValueError(
                    f"init_lora_weights={config.init_lora_weights!r} reads dense weights, which {where} does not have;"
                    " use True, False or 'gaussian'"
                )
            for option in _REFUSED:
                if getattr(config, option):
                    raise ValueError(f"LoRA on {where} does not support {option}")
        super().update_layer(adapter_name, *args, config=config, **kwargs)  # type: ignore[misc]  # PEFT's

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        base = self.packed_base()
        if base is None:
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)  # type: ignore[misc]
            return
        blocks = base.get_parameter(f"{self.weight_name()}_blocks")
        for layers in (self.lora_A, self.lora_B):
            if adapter_name in layers and not any(p.is_meta for p in layers[adapter_name].parameters()):
                layers[adapter_name].to(device or blocks.device, dtype=base.dense_dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to what is held, once for all of them, and rounds that to MXFP4 again.

        Args:
            safe_merge: makes no difference: weights that are not finite always raise, before anything is changed.
            adapter_names: as PEFT's.

        Raises:
            ValueError: weights that are not finite, or are offloaded.
        """
        base, name = self.packed_base(), self.weight_name()
        if base is None:
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        adapters = [*self.merged_adapters, *names]
        held = base.packed_here(name)
        before = self.before or (mxfp4.MXFP4Tensor(*(part.clone() for part in held)), base.source)
        merged, self.rounding = self._merged(before[0], adapters)
        self._hold(base, merged)
        self.before, self.merged_adapters = before, adapters

    @torch.no_grad()
    def _merged(self, kept: mxfp4.MXFP4Tensor, adapters: list[str]) -> tuple[mxfp4.MXFP4Tensor, Rounding]:
        """What is held with adapters merged into it, rounded one expert at a time."""
        merged = mxfp4.MXFP4Tensor(*(torch.empty_like(part) for part in kept))
        old, new = (mxfp4.MXFP4Tensor(*(p if p.ndim == 3 else p.unsqueeze(0) for p in t)) for t in (kept, merged))
        error = weights = added = 0.0
        for e in range(old.blocks.shape[0]):
            delta = sum((self.delta(adapter, e) for adapter in adapters), start=torch.zeros(()))
            wanted = mxfp4.dequantize(old.blocks[e], old.scales[e]) + delta
            rounded = ops.quantize(wanted, *self.rules, name=f"{self.weight_name()}[{e}] with adapters merged into it")
            new.blocks[e], new.scales[e] = rounded
            error += float((rounded.dequantize() - wanted).double().square().sum())
            weights += float(wanted.double().square().sum())
            added += float(delta.double().square().sum())
        return merged, Rounding(error, weights, added)

    @torch.no_grad()
    def _hold(self, base: PackedModule, tensor: mxfp4.MXFP4Tensor) -> None:
        for part, value in zip(_PARTS, tensor, strict=True):
            base.get_parameter(f"{self.weight_name()}_{part}").copy_(value)

    def unmerge(self) -> None:
        """Puts back the bytes from before adapters were merged."""
        base = self.packed_base()
        if base is None or self.before is None:
            super().unmerge()  # type: ignore[misc]
            return
        self._hold(base, self.before[0])
        base.source, self.before, self.rounding, self.merged_adapters = self.before[1], None, None, []


class ExpertsAdapter(_OnPacked, ParamWrapper):  # type: ignore[misc]  # PEFT has no types
    """LoRA on one projection of packed experts. As PEFT's class, it is nested where both are adapted."""

    def weight_name(self) -> str:
        """The projection."""
        return str(self.parameter_name)

    def factors(self, adapter: str) -> tuple[Tensor, Tensor, float]:
        """[E, K, r], [E, r, N] and a number: x @ first @ second * number is what the adapter adds."""
        first, second = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        first = first.view(self.num_experts, -1, first.shape[-1])  # [E, r, "in"]
        second = second.view(second.shape[0], -1, self.num_experts).permute(2, 0, 1)  # [E, "out", r]
        # Where a class keeps [E, K, N] and does not say so, as Llama 4's, what PEFT takes for outputs are inputs.
        if self._did_swap_in_out_features and self.packed_base().layout.is_transposed:
            return second, first, self.scaling[adapter]
        return first.mT, second.mT, self.scaling[adapter]

    def delta(self, adapter: str, expert: int) -> Tensor:
        """As `_OnPacked.delta`."""
        first, second, scaling = self.factors(adapter)
        return (first[expert].float() @ second[expert].float()).mT * scaling

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """What an adapter adds to the dense parameter, in that one's shape."""
        base = self.packed_base()
        if base is None:
            dense: Tensor = super().get_delta_weight(adapter_name, *args, **kwargs)
            return dense
        first, second, scaling = self.factors(adapter_name)
        delta = first @ second * scaling
        return delta if base.layout.is_transposed else delta.mT

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The experts' output, with the active adapters beside the packed projection."""
        base = self.packed_base()
        if base is None:
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        terms = [self.factors(adapter) for adapter in self.active_adapters if adapter in self.lora_A]
        if not terms:
            return self.base_layer(x, *args, **kwargs)
        if isinstance(getattr(base, "_hf_hook", None), StreamingHook):
            raise ValueError(
                "LoRA on experts that are streamed from disk is not supported; load them without offloading"
            )
        beside = base.beside
        beside[self.parameter_name] = partial(low_rank, terms)
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            del beside[self.parameter_name]


ExpertsAdapter.__name__ = ParamWrapper.__name__  # by which PEFT knows wrappers that may be nested


class LinearAdapter(_OnPacked, Linear):  # type: ignore[misc]
    """LoRA on a packed linear layer of one expert. The forward is PEFT's own."""

    def weight_name(self) -> str:
        """The weight."""
        return "weight"

    lora_variants = LoraLayer.lora_variants  # none, as those that PEFT's linear layer has read dense weights

    def delta(self, adapter: str, expert: int) -> Tensor:
        """As `_OnPacked.delta`; there is one expert."""
        delta: Tensor = self.get_delta_weight(adapter).float()
        return delta


def low_rank(terms: list[tuple[Tensor, Tensor, float]], x: Tensor, slots: routing.Plan) -> Tensor:
    """What adapters add to a projection of each slot, computed in the dtype of the adapters.

    The slots of each expert are cut into tiles of equal length, of which there can be no more than a number that shapes
    give; so nothing waits for the device, and of an adapter only what belongs to experts with slots is read.

    Args:
        terms: what `ExpertsAdapter.factors` gives, for each adapter.
        x: [S, K], sorted by expert.
        slots: the plan that sorted it.

    Returns:
        [S, N]; rows of slots that belong to no expert have no meaning, and pass no gradient.
    """
    count, experts = x.shape[0], slots.offsets.shape[0] - 1
    size = _SMALL_TILE if count < _LARGE_TILE * experts else _LARGE_TILE
    ends = ((slots.offsets.diff() + size - 1) // size).cumsum(0)
    starts = ends - (slots.offsets.diff() + size - 1) // size
    tile = torch.arange(min(count, (count + experts * (size - 1)) // size), device=x.device)
    owner = torch.searchsorted(ends, tile, right=True).clamp(max=experts - 1)
    row = slots.offsets[owner] + (tile - starts[owner]) * size
    rows = row.unsqueeze(-1) + torch.arange(size, device=x.device)  # [tiles, size]
    used = rows < slots.offsets[owner + 1].unsqueeze(-1)
    # A row that is not the tile's own counts for nothing, even where it is not finite.
    tiles = x[rows.clamp(max=count - 1)].masked_fill(~used.unsqueeze(-1), 0)
    expert = slots.experts.clamp(max=experts - 1)
    within = torch.arange(count, device=x.device) - slots.offsets[expert]
    place = torch.where(slots.experts < experts, starts[expert] * size + within, 0)
    added = [
        (tiles.to(first.dtype) @ first[owner] @ second[owner] * scaling).flatten(0, 1)[place]
        for first, second, scaling in terms
    ]
    return sum(added[1:], start=added[0])


def install() -> None:
    """Wraps what PEFT's LoRA does to a model, so that it adapts packed weights; other models see no difference."""
    LoraModel.inject_adapter = _injecting(LoraModel.inject_adapter)
    LoraModel._create_new_module = staticmethod(_creating(LoraModel._create_new_module))
    for name in ("_unload_and_optionally_merge", "merge_adapter"):
        setattr(LoraModel, name, _telling(getattr(LoraModel, name)))


def _injecting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`inject_adapter` that finds the projections of packed experts."""

    @wraps(stock)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
        if not packed:
            return stock(self, model, adapter_name, *args, **kwargs)
        _check_targets(getattr(self.peft_config[adapter_name], "target_parameters", None) or (), model, packed)
        with _stand_ins([module for module in packed.values() if isinstance(module, MXFP4Experts)]):
            result = stock(self, model, adapter_name, *args, **kwargs)
        config: Any = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
        if hasattr(config, "scale_rule"):
            for layer in model.modules():
                if isinstance(layer, _OnPacked):
                    layer.rules = (config.scale_rule, config.ties)
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


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A method that may merge adapters, and tells what rounding did to them."""

    @wraps(stock)
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [layer for layer in self.model.modules() if isinstance(layer, _OnPacked)]
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


def _note_losses(layers: list[_OnPacked]) -> None:
    """Says of each packed module what was merged into it, in its `source`."""
    by_base: dict[Any, list[_OnPacked]] = {}
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
        f"{name}.{proj}": [f"{name}.{proj}_{part}" for part in _PARTS]
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

"""LoRA on packed weights: the layers that PEFT's `LoraModel` puts around packed modules, see `injection`.

`ExpertsAdapter` adds scaling * B (A x) to a packed projection's product for each slot. Names and shapes of A and B are
PEFT's own for the dense class, so that adapters of dense models fit packed ones and the other way round. E experts,
S slots, N output features, K input features, r the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear, LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from .. import mxfp4, ops, routing
from ..packed import PackedModule, Source, shard_of
from .streaming import StreamingHook

PARTS = ("blocks", "scales")
"""What packed parameters end in."""

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


class OnPacked:
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
        for part, value in zip(PARTS, tensor, strict=True):
            base.get_parameter(f"{self.weight_name()}_{part}").copy_(value)

    def unmerge(self) -> None:
        """Puts back the bytes from before adapters were merged."""
        base = self.packed_base()
        if base is None or self.before is None:
            super().unmerge()  # type: ignore[misc]
            return
        self._hold(base, self.before[0])
        base.source, self.before, self.rounding, self.merged_adapters = self.before[1], None, None, []


class ExpertsAdapter(OnPacked, ParamWrapper):  # type: ignore[misc]  # PEFT has no types
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
        """As `OnPacked.delta`."""
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


class LinearAdapter(OnPacked, Linear):  # type: ignore[misc]
    """LoRA on a packed linear layer of one expert. The forward is PEFT's own."""

    def weight_name(self) -> str:
        """The weight."""
        return "weight"

    lora_variants = LoraLayer.lora_variants  # none, as those that PEFT's linear layer has read dense weights

    def delta(self, adapter: str, expert: int) -> Tensor:
        """As `OnPacked.delta`; there is one expert."""
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

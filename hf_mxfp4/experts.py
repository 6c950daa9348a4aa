"""MXFP4Experts: the experts of one MoE layer, held packed, in the place of a Transformers experts module.

E experts, T tokens, k experts a token, H hidden size, I intermediate size. A Transformers experts class holds
`gate_up_proj` (or `up_proj` where it has no gate) and `down_proj`, 3-D, as [E, out, in], or [E, in, out] where it says
`is_transposed`. Packed, each becomes `{proj}_blocks` uint8 [E, out, in / 2] and `{proj}_scales` uint8
[E, out, in / 32], rows in the class's own order, so that the class's own activation works on what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import mxfp4, ops, routing
from .backends import Choice, choose

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed")


class Source(NamedTuple):
    """Where packed weights came from: the layout on disk, the dtypes there, and what made them what is held."""

    format: str
    dtypes: tuple[str, ...]
    conversion: str


def projections(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The dense projections of a Transformers experts module by name, each [E, out, in] or transposed.

    Empty for a module that is no experts module: one is known by the flags that Transformers'
    `use_experts_implementation` sets and by its 3-D parameters.
    """
    if isinstance(experts, MXFP4Experts) or not all(hasattr(experts, flag) for flag in _FLAGS):
        return {}
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    found = {name: getattr(experts, name, None) for name in names}
    return {name: p for name, p in found.items() if isinstance(p, nn.Parameter) and p.ndim == 3}


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every experts module of a model by name, packed or dense."""
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Experts) or projections(module):
            yield name, module


class MXFP4Experts(nn.Module):
    """The experts of a MoE layer, packed in MXFP4.

    Packed tensors are uint8 parameters, because buffers are neither offloaded to disk nor sharded; they need no
    gradient and casts leave them alone. Gradients reach the hidden states, the routing weights and any bias.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: nn.Module
    post_expert_norm: nn.Module
    dense_class: Any
    """The Transformers class that this module stands for."""

    def __init__(self, experts: nn.Module, *, name: str = "experts", backend: str = "auto") -> None:
        """Takes the place of `experts`: its attributes, child modules and other parameters, with room for packed ones.

        Args:
            experts: a Transformers experts module, on any device, also meta. Left as it is.
            name: what errors call it.
            backend: see `backends.choose`.

        Raises:
            ValueError: a projection whose input width is no multiple of 32, or a module with no projections.
        """
        super().__init__()
        dense = projections(experts)
        if not dense:
            raise ValueError(f"{name} is a {type(experts).__name__}, which has no 3-D expert projections to pack")
        _copy_shell(experts, self, skip=tuple(dense))
        self.dense_class = type(experts)
        self.dense_dtype = dense["down_proj"].dtype
        self.requested_backend = backend
        self.source: Source | None = None
        self._choices: dict[str, Choice] = {}
        for proj, weight in dense.items():
            shape = weight.mT.shape if experts.is_transposed else weight.shape
            mxfp4.check_width(shape, f"{name}.{proj}")
            for suffix, width in (("blocks", shape[2] // 2), ("scales", shape[2] // mxfp4.BLOCK_SIZE)):
                packed = torch.empty(*shape[:2], width, dtype=torch.uint8, device=weight.device)
                self.register_parameter(f"{proj}_{suffix}", nn.Parameter(packed, requires_grad=False))

    @classmethod
    def from_dense(
        cls,
        experts: nn.Module,
        scale_rule: mxfp4.ScaleRule = "mse",
        ties: mxfp4.Ties = "even",
        *,
        backend: str = "auto",
    ) -> MXFP4Experts:
        """Quantizes a Transformers experts module, one expert at a time. The module itself is left as it is.

        Args:
            experts: the module, with weights in float32, bfloat16 or float16.
            scale_rule: see `mxfp4.quantize`.
            ties: see `mxfp4.quantize`.
            backend: see `backends.choose`.

        Returns:
            The packed module, on the same device.

        Raises:
            ValueError: as for the class, or a weight that is not finite.
        """
        packed = cls(experts, backend=backend)
        for proj, weight in projections(experts).items():
            blocks, scales = packed.packed(proj)
            for e in range(weight.shape[0]):
                matrix = weight[e].mT if experts.is_transposed else weight[e]
                blocks[e], scales[e] = mxfp4.quantize(matrix, scale_rule, ties, name=f"{proj}[{e}]")
        packed.source = Source("dense module", (str(packed.dense_dtype),), f"quantized: {scale_rule}, ties {ties}")
        return packed

    @property
    def projection_names(self) -> tuple[str, str]:
        """The names of the two projections."""
        return ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")

    def packed(self, proj: str) -> mxfp4.MXFP4Tensor:
        """The packed bytes of a projection: `blocks` uint8 [E, out, in / 2], `scales` uint8 [E, out, in / 32]."""
        return mxfp4.MXFP4Tensor(self.get_parameter(f"{proj}_blocks").data, self.get_parameter(f"{proj}_scales").data)

    def dense_shape(self, proj: str) -> tuple[int, int, int]:
        """The shape of a projection in the class that this module stands for."""
        experts, rows, half = self.get_parameter(f"{proj}_blocks").shape
        return (experts, 2 * half, rows) if self.is_transposed else (experts, rows, 2 * half)

    def backend_choice(self, device_type: str) -> Choice:
        """The backend that runs on a device, and why: chosen at the first call, then kept."""
        if device_type not in self._choices:
            self._choices[device_type] = choose(self.requested_backend, device_type)
        return self._choices[device_type]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs each token through its experts and mixes what comes out.

        Works in float32 (float64 for float64 tokens) from the projections to the sum.

        Args:
            hidden_states: floating point [T, H].
            top_k_index: integer [T, k]; ids outside 0 to E - 1 contribute nothing.
            top_k_weights: floating point [T, k], used as they are.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        compute = torch.promote_types(hidden_states.dtype, torch.float32)
        slots = routing.plan(top_k_index, self.num_experts)
        first, second = self.projection_names
        x = self._linear(routing.gather(hidden_states, slots).to(compute), first, slots)
        x = (self._apply_gate(x) if self.has_gate else self.act_fn(x)).to(compute)
        x = self._linear(x, second, slots)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x).to(compute)
        return routing.combine(x, slots, top_k_weights.to(compute)).to(hidden_states.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The module of Transformers' own class that this one stands for, with the weights that it holds decoded.

        Args:
            dtype: of the weights; by default what they had.

        Returns:
            A dense experts module on the same device.
        """
        dense: nn.Module = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(dense)
        own = [f"{proj}_{suffix}" for proj in self.projection_names for suffix in ("blocks", "scales")]
        _copy_shell(self, dense, skip=(*own, *_OWN_ATTRIBUTES))
        dense.train(self.training)
        for proj in self.projection_names:
            blocks, scales = self.packed(proj)
            weight = torch.empty(self.dense_shape(proj), dtype=dtype or self.dense_dtype, device=blocks.device)
            for e in range(weight.shape[0]):
                (weight[e].mT if self.is_transposed else weight[e]).copy_(
                    mxfp4.dequantize(blocks[e], scales[e], weight.dtype)
                )
            dense.register_parameter(proj, nn.Parameter(weight))
        return dense

    def extra_repr(self) -> str:
        """One line for printed models."""
        shapes = ", ".join(f"{proj}={self.dense_shape(proj)}" for proj in self.projection_names)
        return f"{self.dense_class.__name__}, {shapes}, backend={self.requested_backend}"

    def _linear(self, x: Tensor, proj: str, slots: routing.Plan) -> Tensor:
        blocks, scales = self.get_parameter(f"{proj}_blocks"), self.get_parameter(f"{proj}_scales")
        out = ops.grouped_linear(x, blocks, scales, slots.offsets, backend=self.backend_choice(x.device.type).name)
        bias = getattr(self, f"{proj}_bias", None)
        if bias is not None:
            out = out + bias.to(out.dtype)[slots.experts.clamp(max=self.num_experts - 1)]
        return out

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self.dense_class._apply_gate(self, gate_up)
        return gated

    def _dense_stand_in(self, proj: str) -> nn.Parameter:
        """A parameter on meta with the dense shape, for model code that looks at the projection it once had."""
        if proj not in self.projection_names:
            raise AttributeError(f"{type(self).__name__} for {self.dense_class.__name__} has no {proj}")
        stand_in = nn.Parameter(torch.empty(self.dense_shape(proj), dtype=self.dense_dtype, device="meta"))
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]  # the flag that Transformers looks at
        return stand_in

    gate_up_proj = property(lambda self: self._dense_stand_in("gate_up_proj"))
    up_proj = property(lambda self: self._dense_stand_in("up_proj"))
    down_proj = property(lambda self: self._dense_stand_in("down_proj"))


_OWN_ATTRIBUTES = ("dense_class", "dense_dtype", "requested_backend", "source", "_choices")


def _copy_shell(source: nn.Module, target: nn.Module, skip: tuple[str, ...]) -> None:
    """Gives `target` what `source` has beside the names in `skip`: attributes, children, parameters and buffers."""
    kept = {*nn.Module().__dict__, *skip}
    target.__dict__.update({name: value for name, value in source.__dict__.items() if name not in kept})
    for name, child in source._modules.items():
        target.add_module(name, child)
    for name, parameter in source._parameters.items():
        if name not in kept:
            target.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        target.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)

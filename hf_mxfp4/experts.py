"""MXFP4Experts: the experts of one MoE layer, held packed, in the place of a Transformers experts module.

E experts, T tokens, k experts a token, H hidden size, I intermediate size. A Transformers experts class holds
`gate_up_proj` (or `up_proj` where it has no gate) and `down_proj`, 3-D, as [E, out, in], or [E, in, out] where it says
`is_transposed`. Packed, each becomes `{proj}_blocks` uint8 [E, out, in / 2] and `{proj}_scales` uint8
[E, out, in / 32], rows in the class's own order, so that the class's own activation works on what comes out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import activations, mxfp4, ops, routing
from .families import FLAT_SOURCES, Layout, flat_rows, layout_of, projections
from .packed import PACKED_ATTRIBUTES, PackedModule, Source, dtype_names


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every experts module of a model by name, packed or dense."""
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Experts) or projections(module):
            yield name, module


class MXFP4Experts(PackedModule):
    """The experts of a MoE layer, packed in MXFP4. Gradients reach hidden states, routing weights and any bias."""

    layout: Layout
    """What the class that this module stands for is like."""
    flat_shell: nn.Module
    act_fn: nn.Module
    known_activation: activations.Activation | None
    """What stands between the projections, if it is of the kind that kernels know."""
    fusable: bool
    """Whether a backend that knows the activation can run all of the module in one call."""
    post_expert_norm: nn.Module
    beside: dict[str, Callable[[Tensor, routing.Plan], Tensor]]
    """What is added to a projection's outputs, by its name, from its inputs [S, K] and their slots. For adapters, which
    put it there for the time of a forward."""

    def __init__(
        self, experts: nn.Module, *, name: str = "experts", backend: str = "auto", activation: str = "auto"
    ) -> None:
        """Takes the place of `experts`: its attributes, child modules and other parameters, with room for packed ones.

        Args:
            experts: a Transformers experts module, on any device, also meta. Left as it is.
            name: what errors call it.
            backend: see `backends.choose`.
            activation: "int8" rounds activations to 8 bits before they are multiplied; "auto" keeps what they have.

        Raises:
            ValueError: a projection whose input width is no multiple of 32, or a module with no projections.
        """
        super().__init__()
        layout, dense = layout_of(experts), projections(experts)
        if layout is None or not dense:
            raise ValueError(f"{name} is a {type(experts).__name__}, which has no 3-D expert projections to pack")
        device = next(experts.parameters()).device
        _copy_shell(experts, self, skip=(*dense, "mlp") if layout.is_flat else tuple(dense))
        self.training = experts.training
        self._pack_init(type(experts), dense["down_proj"].dtype, backend, activation)
        self.layout, self.beside = layout, {}
        self.dense_counts = {proj: weight.shape[0] for proj, weight in dense.items()}
        for proj, weight in dense.items():
            _, rows, columns = weight.mT.shape if layout.is_transposed else weight.shape
            self._make_room(proj, (self.num_routed, rows, columns), f"{name}.{proj}", device)
        if layout.is_flat:
            flat: Any = experts.mlp
            self.act_fn = copy.deepcopy(flat.activation_fn)
            inner = _empty(type(flat))
            _copy_shell(flat, inner, skip=tuple(name for names in FLAT_SOURCES.values() for name in names))
            self.__dict__["flat_shell"] = inner  # not a child: it stands for nothing until `dequantize`
        self._look_at_activation()

    def _look_at_activation(self) -> None:
        self.known_activation = activations.recognise(self._activate, self.layout.has_gate, self)
        plain = not (self.layout.identities or getattr(self, "has_post_expert_norm", False))
        self.fusable = plain and self.known_activation is not None

    def __setattr__(self, name: str, value: Any) -> None:
        """As for any module; what may make another activation of the class's own is looked at again."""
        super().__setattr__(name, value)
        known = name.startswith("_") or name in _NOT_OF_THE_ACTIVATION or activations.NOT_BETWEEN.search(name)
        if "fusable" in self.__dict__ and not known:
            del self.fusable
            self._look_at_activation()

    @classmethod
    def from_dense(
        cls,
        experts: nn.Module,
        scale_rule: mxfp4.ScaleRule = "mse",
        ties: mxfp4.Ties = "even",
        *,
        backend: str = "auto",
        activation: str = "auto",
    ) -> MXFP4Experts:
        """Quantizes a Transformers experts module, one expert at a time. The module itself is left as it is.

        For a module on its own. A model that such a module is put into by hand has no quantization config to save;
        `from_pretrained` with an `MXFP4Config` makes one that has.

        Args:
            experts: the module, with weights in float32, bfloat16 or float16.
            scale_rule: see `mxfp4.quantize`.
            ties: see `mxfp4.quantize`.
            backend: see `backends.choose`.
            activation: as for the class.

        Returns:
            The packed module, on the same device.

        Raises:
            ValueError: as for the class, or a weight that is not finite.
        """
        packed = cls(experts, backend=backend, activation=activation)
        dense = projections(experts)
        for proj, weight in dense.items():
            blocks, scales = packed.packed(proj)
            for e in range(packed.num_routed):
                if packed.layout.is_flat:
                    sources = [getattr(experts.mlp, name) for name in FLAT_SOURCES[proj]]
                    matrix = torch.cat([flat_rows(proj, source, packed.num_routed, e) for source in sources])
                else:
                    matrix = weight[e].mT if packed.layout.is_transposed else weight[e]
                blocks[e], scales[e] = ops.quantize(matrix, scale_rule, ties, name=f"{proj}[{e}]")
        dtypes = dtype_names([dense["down_proj"]])
        packed.source = Source("dense module", dtypes, f"quantized: {scale_rule}, ties {ties}")
        return packed

    @property
    def projection_names(self) -> tuple[str, ...]:  # type: ignore[override]  # read from the layout
        """The names of the two projections."""
        return self.layout.projections

    @property
    def num_routed(self) -> int:
        """E, the number of experts that have weights here; under expert parallelism, of this rank."""
        count: int = getattr(self, self.layout.experts)
        return count

    def dense_shape(self, proj: str) -> tuple[int, int, int]:
        """The shape of a projection in the class that this module stands for."""
        experts, rows, half = self.get_parameter(f"{proj}_blocks").shape
        experts = max(experts, self.dense_counts[proj]) if self.layout.identities else experts
        return (experts, 2 * half, rows) if self.layout.is_transposed else (experts, rows, 2 * half)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Runs each token through its experts and mixes what comes out.

        Sums are float32 (float64 for float64 tokens), and so is all between the projections and the mixture. The native
        kernel rounds what it multiplies to bfloat16 if tokens are bfloat16. Classes whose tokens come in
        grouped by expert take tokens alone, E equal groups of them, and give each token's output unmixed.

        Args:
            hidden_states: floating point [T, H]; with more dimensions before H for classes that take them so.
            top_k_index: integer [T, k]; ids that are no expert's contribute nothing.
            top_k_weights: floating point [T, k], used as they are.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        shape = hidden_states.shape
        if self.layout.is_flat:
            hidden_states = hidden_states.reshape(-1, shape[-1])
        if self.layout.is_grouped:
            top_k_index, top_k_weights = self._grouped_routes(hidden_states)
        if top_k_index is None or top_k_weights is None:
            raise TypeError(f"{self.dense_class.__name__} takes hidden_states, top_k_index and top_k_weights")
        routing.check(hidden_states, top_k_index, top_k_weights, ("hidden_states", "top_k_index", "top_k_weights"))
        if self.fusable and (fused := self._run_fused(hidden_states, top_k_index, top_k_weights)) is not None:
            return fused.view(shape) if self.layout.is_flat else fused
        compute = torch.promote_types(hidden_states.dtype, torch.float32)
        weights = top_k_weights.to(compute)
        slots = routing.plan(top_k_index, self.num_routed)
        mixed = routing.combine(self._run(hidden_states, slots, compute), slots, weights)
        if self.layout.identities:
            last = self.num_routed + (getattr(self, self.layout.identities) or 0)
            identity = (top_k_index >= self.num_routed) & (top_k_index < last)
            # Under tensor parallelism this child, which stands for them, gives each process its part of the token.
            own: Any = getattr(self, "identity_expert", None)
            token = hidden_states if own is None else own(hidden_states)
            mixed = mixed + weights.masked_fill(~identity, 0).sum(dim=-1, keepdim=True) * token.to(compute)
        return mixed.to(hidden_states.dtype).view(shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The module of Transformers' own class that this one stands for, with the weights that it holds decoded.

        Args:
            dtype: of all floating point parameters; by default what weights had, or what this module was cast to.

        Returns:
            A dense experts module on the same device.

        Raises:
            ValueError: packed bytes that are not here, as when they are offloaded.
        """
        dense: nn.Module = _empty(self.dense_class)
        own = [f"{proj}_{suffix}" for proj in self.projection_names for suffix in ("blocks", "scales")]
        _copy_shell(self, dense, skip=(*own, *_OWN_ATTRIBUTES))
        dense.training = self.training
        for proj in self.projection_names:
            blocks, scales = self.packed_here(proj)
            weight = torch.zeros(self.dense_shape(proj), dtype=dtype or self.dense_dtype, device=blocks.device)
            for e in range(blocks.shape[0]):
                (weight[e].mT if self.layout.is_transposed else weight[e]).copy_(
                    mxfp4.dequantize(blocks[e], scales[e], weight.dtype)
                )
            if self.layout.is_flat:
                self._register_flat(dense, proj, weight)
            else:
                dense.register_parameter(proj, nn.Parameter(weight))
        return dense if dtype is None else dense.to(dtype)

    def _register_flat(self, dense: Any, proj: str, weight: Tensor) -> None:
        """Gives a dense module of a flat class the weights of a projection [E, N, K]."""
        if "mlp" not in dense._modules:
            dense.add_module("mlp", copy.deepcopy(self.flat_shell))
            del dense.act_fn
        names = FLAT_SOURCES[proj]
        parts = weight.mT.chunk(1) if proj == "down_proj" else weight.chunk(len(names), dim=1)
        for name, part in zip(names, parts, strict=True):
            dense.mlp.register_parameter(name, nn.Parameter(part.reshape(-1, part.shape[-1])))

    def extra_repr(self) -> str:
        """One line for printed models."""
        shapes = ", ".join(f"{proj}={self.dense_shape(proj)}" for proj in self.projection_names)
        return f"{self.dense_class.__name__}, {shapes}, backend={self.requested_backend}"

    def _grouped_routes(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights of tokens that come in grouped by expert, an equal number for each."""
        count = hidden_states.shape[0]
        if count % self.num_routed:
            raise ValueError(f"{count} tokens are no equal groups for {self.num_routed} experts")
        ids = torch.arange(self.num_routed, device=hidden_states.device).repeat_interleave(count // self.num_routed)
        return ids.unsqueeze(-1), hidden_states.new_ones(count, 1)

    def _run_fused(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
        """All of the module in one call of a backend that can; None otherwise, and where a gradient is asked for."""
        dtype, held = hidden_states.dtype, self._parameters
        if dtype not in _FUSED_DTYPES or self.beside:
            return None
        tensors = [hidden_states, top_k_weights, top_k_index, *(value for value in held.values() if value is not None)]
        on_cpu = hidden_states.is_cpu
        for value in tensors:
            if value.is_cpu is not on_cpu:
                return None
        if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
            return None
        if not torch.compiler.is_compiling() and _have_tangents(tensors):
            return None
        backend = self.backend("cpu" if on_cpu else hidden_states.device.type)
        operand, known = self.operand(dtype), ops.MLP_DTYPES.get(backend)
        if known is None or (backend == "triton" and operand == "int8"):
            return None
        packed: list[Any] = []
        for proj in self.layout.projections:
            bias: Tensor | None = held.get(f"{proj}_bias")
            if bias is not None and bias.dtype not in known:
                bias = bias.float()
            packed += (held[f"{proj}_blocks"], held[f"{proj}_scales"], bias)
        if packed[2] is not None and packed[5] is not None and packed[2].dtype is not packed[5].dtype:
            packed[2], packed[5] = packed[2].float(), packed[5].float()
        assert self.known_activation is not None
        mixed = ops.experts_mlp(
            hidden_states if dtype in known else hidden_states.float(),
            top_k_index if top_k_index.dtype is torch.int64 else top_k_index.long(),
            top_k_weights if top_k_weights.dtype is torch.float32 else top_k_weights.float(),
            ops.Projection(*packed[:3]),
            ops.Projection(*packed[3:]),
            self.known_activation,
            operand=operand,
            narrow=backend == "triton" and self.is_narrow(),
            backend=backend,
        )
        return mixed if mixed.dtype is dtype else mixed.to(dtype)

    def _activate(self, outputs: Tensor) -> Tensor:
        """What stands between the projections."""
        return self._apply_gate(outputs) if self.layout.has_gate else self.act_fn(outputs)

    def _run(self, hidden_states: Tensor, slots: routing.Plan, compute: torch.dtype) -> Tensor:
        """Each sorted slot through its expert, [S, H]."""
        first, second = self.projection_names
        operand = self.operand(hidden_states.dtype)
        x = self._linear(routing.gather(hidden_states, slots).to(compute), first, slots, operand)
        x = self._linear(self._activate(x).to(compute), second, slots, operand)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x).to(compute)
        return x

    def _linear(self, x: Tensor, proj: str, slots: routing.Plan, operand: str) -> Tensor:
        blocks, scales = self.get_parameter(f"{proj}_blocks"), self.get_parameter(f"{proj}_scales")
        backend = self.backend(x.device.type)
        narrow = backend == "triton" and self.is_narrow()
        out = ops.grouped_linear(x, blocks, scales, slots.offsets, operand=operand, narrow=narrow, backend=backend)
        if proj in self.beside:
            out = out + self.beside[proj](x, slots).to(out.dtype)
        bias = getattr(self, f"{proj}_bias", None)
        if bias is not None:
            out = out + bias.to(out.dtype)[slots.experts.clamp(max=self.num_routed - 1)]
        return out

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        own = getattr(self.dense_class, "_apply_gate", None)
        if own is None:
            gate, up = gate_up.chunk(2, dim=-1)
            gated: Tensor = self.act_fn(gate) * up
        else:
            gated = own(self, gate_up)
        return gated

    gate_up_proj = property(lambda self: self._stand_in("gate_up_proj"))
    up_proj = property(lambda self: self._stand_in("up_proj"))
    down_proj = property(lambda self: self._stand_in("down_proj"))


def _have_tangents(tensors: Iterable[Tensor]) -> bool:
    """Whether a forward-mode derivative is asked for through one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(value).tangent is not None for value in tensors if value.is_floating_point())


_HOOK_ATTRIBUTES = ("forward", "_hf_hook", "_old_forward")
_OWN_ATTRIBUTES = (*PACKED_ATTRIBUTES, "layout", "dense_counts", "flat_shell", "known_activation", "fusable", "beside")
_NOT_OF_THE_ACTIVATION = (*_OWN_ATTRIBUTES, "forward", "training")
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _empty(kind: Any) -> Any:
    """A module of a class, without what the class's `__init__` would put into it."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def _copy_shell(source: nn.Module, target: nn.Module, skip: tuple[str, ...]) -> None:
    """Gives `target` copies of what `source` has beside the names in `skip`: attributes, children, parameters, buffers.

    Hooks stay behind: they are bound to the module that they are on.
    """
    left = {*nn.Module().__dict__, *_HOOK_ATTRIBUTES, *skip}
    target.__dict__.update({name: value for name, value in source.__dict__.items() if name not in left})
    for name, child in source._modules.items():
        if name in left:
            continue
        target.add_module(name, copy.deepcopy(child))
    for name, parameter in source._parameters.items():
        if name not in left:
            own = None if parameter is None else nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            target.register_parameter(name, own)
    for name, buffer in source._buffers.items():
        own_buffer = None if buffer is None else buffer.clone()
        target.register_buffer(name, own_buffer, persistent=name not in source._non_persistent_buffers_set)

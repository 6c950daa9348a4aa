"""How Transformers' experts classes hold and take what they work with.

Nearly all carry the decorator `use_experts_implementation`, whose flags say it. The few others that can be packed have
a row in `UNDECORATED`. E experts with weights, N output features, K input features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
"""What the projections of experts classes are called."""


class Layout(NamedTuple):
    """What an experts class is like.

    Attributes:
        has_gate: the first projection is `gate_up_proj`, gate and up; otherwise `up_proj`.
        has_bias: projections have biases, `{proj}_bias` [E, N].
        is_transposed: weights are [E, K, N], not [E, N, K].
        is_grouped: tokens come in grouped by expert, an equal number for each, and go out so, without weights.
        experts: the attribute that says how many experts have weights.
        identities: the attribute that says how many experts follow these that give back the token itself, or None.
        is_flat: weights are in a child `mlp`, as 2-D `w1` (gate), `v1` (up) and `w2` (down, transposed), each
            [E * I, H], and tokens come in with their batch dimensions.
    """

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_grouped: bool = False
    experts: str = "num_experts"
    identities: str | None = None
    is_flat: bool = False

    @property
    def projections(self) -> tuple[str, str]:
        """The names of the two projections."""
        return ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")


INTERLEAVED = ("GptOssExperts",)
"""Experts classes in which gate and up rows take turns; in all others every gate comes before every up."""

INTERLEAVED_MODELS = ("gpt_oss",)
"""What the configs of their models call themselves."""

UNDECORATED = {
    "DbrxExperts": Layout(is_flat=True),
    "Llama4TextExperts": Layout(is_transposed=True, is_grouped=True),
    "LongcatFlashExperts": Layout(experts="num_routed_experts", identities="zero_expert_num"),
    "Step3p7Experts": Layout(),
}
"""Experts classes without the decorator, by name."""

_FLAGS = ("has_gate", "has_bias", "is_transposed")
_LOOKS_LIKE_EXPERTS = re.compile(r"Experts|M[oO][eE]$")


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of an experts module, dense or packed, which carries its own; None for any other module."""
    own = getattr(module, "layout", None)
    if isinstance(own, Layout):
        return own
    if all(hasattr(module, flag) for flag in _FLAGS):
        has_gate, has_bias, is_transposed = (bool(getattr(module, flag)) for flag in _FLAGS)
        layout: Layout | None = Layout(has_gate, has_bias, is_transposed)
    else:
        layout = UNDECORATED.get(type(module).__name__)
    return layout if layout is not None and len(_parameters(module, layout)) == 2 else None


def projections(module: nn.Module) -> dict[str, nn.Parameter]:
    """The projections of a dense experts module by name, [E, N, K] or transposed; empty for any other module.

    Those of a flat class are stand-ins on meta, whose weights `flat_rows` gives.
    """
    layout = layout_of(module)
    own = isinstance(getattr(module, "layout", None), Layout)
    return {} if layout is None or own else _parameters(module, layout)


def unpackable(model: nn.Module) -> list[str]:
    """The classes in a model that by their name hold experts, and cannot be packed."""
    names = {type(module).__name__ for module in model.modules() if layout_of(module) is None}
    return sorted(name for name in names if _LOOKS_LIKE_EXPERTS.search(name))


def expert_lists(model: nn.Module, *linear: type[nn.Module]) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of small MLPs, one an expert, as models with code of their own often have them: by name.

    Such a list is called `experts`, and every expert in it has two linear layers or more.

    Args:
        model: any module.
        linear: the classes that count as linear layers.

    Yields:
        The name of a list and the list.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module):
            counts = [sum(isinstance(layer, linear) for layer in expert.modules()) for expert in module]
            if min(counts) >= 2:
                yield name, module


FLAT_SOURCES = {"gate_up_proj": ("w1", "v1"), "down_proj": ("w2",)}
"""Where a flat class has the rows of its projections."""


def flat_rows(proj: str, source: Tensor, count: int, expert: int) -> Tensor:
    """Rows [N, K] of an expert's projection, or part of them, from one of `FLAT_SOURCES` [E * I, H], by view."""
    matrix = source.view(count, -1, source.shape[-1])[expert]
    return matrix.mT if proj == "down_proj" else matrix


def _parameters(module: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    if layout.is_flat:
        inner = getattr(module, "mlp", None)
        if inner is None or not all(hasattr(inner, name) for names in FLAT_SOURCES.values() for name in names):
            return {}
        count = int(getattr(module, layout.experts))
        rows, width = inner.w1.shape[0] // count, inner.w1.shape[1]
        shapes = {"gate_up_proj": (count, 2 * rows, width), "down_proj": (count, width, rows)}
        return {
            name: nn.Parameter(torch.empty(shape, dtype=inner.w1.dtype, device="meta"))
            for name, shape in shapes.items()
        }
    found = {name: getattr(module, name, None) for name in layout.projections}
    return {name: p for name, p in found.items() if isinstance(p, nn.Parameter) and p.ndim == 3}

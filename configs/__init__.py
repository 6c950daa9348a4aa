"""Model shapes and recipes, as JSON files beside this one.

shapes.json    the routed experts of known models: what benchmarks and tests size themselves by
launch.json    how Triton kernels are launched on families of GPUs, written by `hf-mxfp4 tune`
recipes.json   named options for `hf_mxfp4.MXFP4Config`
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple


class ExpertsShape(NamedTuple):
    """The routed experts of one model.

    Attributes:
        layers: layers that have experts.
        num_experts: in a layer.
        experts_per_token: that the router picks.
        hidden_size: input and output features of an expert (the latent width, where the model projects to one first).
        intermediate_size: features between its two projections.
        gated: whether the first projection holds gate and up.
        bias: whether projections have biases.
        activation: its name.
    """

    layers: int
    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    bias: bool
    activation: str

    @property
    def weights_per_layer(self) -> int:
        """Weights in all experts of a layer."""
        return self.num_experts * self.hidden_size * self.intermediate_size * (3 if self.gated else 2)


def shape(name: str) -> ExpertsShape:
    """The shape of a model by the name that shapes.json gives it; KeyError that lists the names for any other."""
    return ExpertsShape(**_entry("shapes.json", name))


def recipe(name: str) -> dict[str, Any]:
    """The keyword arguments for `MXFP4Config` of a named recipe; KeyError that lists the names for any other."""
    return dict(_entry("recipes.json", name))


def _entry(file: str, name: str) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = json.loads(files(__name__).joinpath(file).read_text(encoding="utf-8"))
    if name not in entries:
        raise KeyError(f"{file} has no {name!r}; it has {', '.join(entries)}")
    return entries[name]

"""Weights that a model shares between modules, by the names of packed ones."""

from __future__ import annotations

from torch import nn

from ..experts import MXFP4Experts
from ..families import PROJECTIONS


def retie(model: nn.Module) -> None:
    """Ties packed projections where the model tied dense ones."""
    for module in model.modules():
        tied: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for target, source in list(tied.items()):
            owner, _, proj = target.rpartition(".")
            if proj in PROJECTIONS and isinstance(module.get_submodule(owner), MXFP4Experts):
                del tied[target]
                tied.update({target + suffix: source + suffix for suffix in ("_blocks", "_scales")})


def untie(model: nn.Module) -> None:
    """The reverse, once dense modules are back: one weight for each tie again."""
    for module in model.modules():
        tied: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for target, source in list(tied.items()):
            owner, _, proj = target.removesuffix("_blocks").rpartition(".")
            if target.endswith("_blocks") and proj in PROJECTIONS:
                shared = module.get_parameter(source.removesuffix("_blocks"))
                module.get_submodule(owner).register_parameter(proj, shared)
                tied[f"{owner}.{proj}"] = source.removesuffix("_blocks")
            if target.endswith(("_blocks", "_scales")):
                del tied[target]

"""What comes between the two projections of an expert, as kernels know it, and finding out what a module has there.

With g = min(gate, gate_max) and u = clamp(up, -up_max, up_max):

    h = min(act(g), act_max) * (cap(u, up_cap) + up_add)      cap(v, c) = c * tanh(v / c), or v where c is 0

    act, by kind    sigmoid      cap(g, gate_cap) * sigmoid(alpha * g)
                    gelu         GELU by erf
                    gelu_tanh    GELU by tanh
                    relu2        relu(g)^2
                    relu         relu(g)

SiLU is `sigmoid` as it stands; gpt-oss has alpha 1.702, limits of 7 and adds 1; SiTU has both caps. Without a gate,
h = min(act(g), act_max) of the one input. S rows, I intermediate size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # torch's own custom
from torch import Tensor, nn

KINDS = ("sigmoid", "gelu", "gelu_tanh", "relu2", "relu")
"""Every kind; a kernel knows it by its place here."""

CONSTANTS = ("alpha", "gate_max", "act_max", "up_max", "gate_cap", "up_cap", "up_add")
"""The constants, in the order of `Activation.constants`."""

_QUICK_GELU = 1.702
_LARGEST = 1e5
NOT_BETWEEN = re.compile(r"^post_expert_norm\.|_(blocks|scales|bias)$")
"""Parameters of an experts module that have no part in what stands between its projections."""


@dataclass(frozen=True)
class Activation:
    """An activation and its constants, see above.

    Attributes:
        kind: one of `KINDS`.
        gated: there are a gate and an up.
        interleaved: they take turns; otherwise all gates come first.
        alpha: of the sigmoid.
        gate_max: what the gate is cut at.
        act_max: what the activation of the gate is cut at.
        up_max: what the up's magnitude is cut at.
        gate_cap: of the soft cap of the gate, 0 for none.
        up_cap: of the soft cap of the up, 0 for none.
        up_add: what is added to the up.
    """

    kind: str = "sigmoid"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    gate_max: float = math.inf
    act_max: float = math.inf
    up_max: float = math.inf
    gate_cap: float = 0.0
    up_cap: float = 0.0
    up_add: float = 0.0

    @property
    def constants(self) -> tuple[float, ...]:
        """The values of `CONSTANTS`."""
        return (self.alpha, self.gate_max, self.act_max, self.up_max, self.gate_cap, self.up_cap, self.up_add)

    def __call__(self, outputs: Tensor) -> Tensor:
        """Applies it.

        Args:
            outputs: of the first projection, floating point [S, 2 I], or [S, I] without a gate.

        Returns:
            [S, I] in the same dtype.
        """
        if not self.gated:
            gate, up = outputs, None
        elif self.interleaved:
            gate, up = outputs[..., ::2], outputs[..., 1::2]
        else:
            gate, up = outputs.chunk(2, dim=-1)
        h = self._act(gate.clamp(max=self.gate_max)).clamp(max=self.act_max)
        return h if up is None else h * (_soft_cap(up.clamp(-self.up_max, self.up_max), self.up_cap) + self.up_add)

    def _act(self, g: Tensor) -> Tensor:
        if self.kind == "sigmoid":
            return _soft_cap(g, self.gate_cap) * torch.sigmoid(self.alpha * g)
        if self.kind in ("gelu", "gelu_tanh"):
            return F.gelu(g, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return g.relu().square() if self.kind == "relu2" else g.relu()


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def recognise(apply: Callable[[Tensor], Tensor], gated: bool, module: nn.Module) -> Activation | None:
    """Finds the activation that a module's own code computes, by running it on numbers.

    Every number among the attributes of the module and of its children is a constant to try. What agrees to 1e-5 on
    inputs of all sizes up to 10^5, so that no limit below is missed, is taken.

    Args:
        apply: the module's own activation, float32 [S, 2 I] or [S, I] to [S, I], for any I.
        gated: there are a gate and an up.
        module: where constants are looked for.

    Returns:
        The activation, or None for one that is not of the known kind, or that has parameters.
    """
    if any(not NOT_BETWEEN.search(name) for name, _ in module.named_parameters()):
        return None
    held = {float(v) for m in module.modules() for v in vars(m).values() if type(v) in (int, float)}
    constants = sorted(c for c in {abs(v) for v in held} if 0 < c < _LARGEST)
    # Device and dtype are said, because while a model loads the defaults are its own.
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    ends = torch.logspace(0, math.log10(_LARGEST), 12, **on_cpu)
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (len(ends), 64)
    outputs = (2 * torch.rand(shape, generator=generator, **on_cpu) - 1) * ends[:, None]
    try:
        with torch.no_grad():
            expected = apply(outputs.clone())
            if (
                expected.shape != (shape[0], shape[1] // 2 if gated else shape[1])
                or expected.dtype is not torch.float32
            ):
                return None
            for candidate in _candidates(gated, constants):
                if torch.allclose(candidate(outputs), expected, rtol=1e-5, atol=1e-5):
                    return candidate
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None  # code that does not take such inputs, or whose parameters have no values yet
    return None


def _candidates(gated: bool, constants: list[float]) -> Iterator[Activation]:
    """Activations that these constants can make, the likeliest first."""
    alphas = dict.fromkeys((1.0, _QUICK_GELU, *(c for c in constants if c < 10)))
    limits = (math.inf, *constants)
    for interleaved in (False, True) if gated else (False,):
        for kind in KINDS:
            yield Activation(kind, gated, interleaved)
        for alpha, limit in product(alphas, limits):
            for add in (0.0, 1.0) if gated else (0.0,):
                yield Activation("sigmoid", gated, interleaved, alpha, limit, up_max=limit, up_add=add)
            yield Activation("sigmoid", gated, interleaved, alpha, act_max=limit, up_max=limit)
        for gate_cap, up_cap in product((0.0, *constants), repeat=2):
            yield Activation("sigmoid", gated, interleaved, gate_cap=gate_cap, up_cap=up_cap)

"""The quality gate: what packing the experts does to what a model predicts, on the shipped model and its held-out text.

The reference is the dense model in float32. Text is cut into windows of 128 tokens that do not overlap, without a
beginning-of-text token, and every position counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from .quantizer import MXFP4Config

WINDOW = 128
_BATCH = 16

KL_LIMIT = 0.0300
"""Nats a token, at most, for the default scale rule."""

TOP1_LIMIT = 0.85
"""Share of positions, at least, at which both models think the same token likeliest."""

KL_TO_FLOOR_LIMIT = 0.93
"""KL of the default scale rule over that of `floor`, at most."""


@dataclass(frozen=True)
class Quality:
    """How a model's predictions differ from a reference's.

    Attributes:
        kl: mean Kullback-Leibler divergence of the model from the reference, nats a token.
        top1: share of positions at which both think the same token likeliest.
        tokens: positions compared.
    """

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True)
class GateResult:
    """The gate's figures.

    Attributes:
        default: the default scale rule against the dense model.
        floor: the rule `floor` against the dense model.
    """

    default: Quality
    floor: Quality

    def failures(self) -> list[str]:
        """The limits that do not hold, in words; empty if the gate is passed."""
        ratio = self.default.kl / self.floor.kl
        checks = (
            (self.default.kl <= KL_LIMIT, f"KL {self.default.kl:.4f} is above {KL_LIMIT}"),
            (self.default.top1 >= TOP1_LIMIT, f"top-1 agreement {self.default.top1:.4f} is below {TOP1_LIMIT}"),
            (ratio <= KL_TO_FLOOR_LIMIT, f"KL is {ratio:.3f} of the floor rule's, above {KL_TO_FLOOR_LIMIT}"),
        )
        return [message for holds, message in checks if not holds]


@torch.no_grad()
def compare(reference: Any, model: Any, tokens: Tensor) -> Quality:
    """Compares two causal language models over a text.

    Args:
        reference: the model that is right.
        model: the model to judge, with the same vocabulary.
        tokens: int64 [n], the text; tokens that fill no whole window are left out.

    Returns:
        The comparison.

    Raises:
        ValueError: fewer tokens than a window.
    """
    windows = tokens[: tokens.numel() // WINDOW * WINDOW].view(-1, WINDOW)
    if not len(windows):
        raise ValueError(f"{tokens.numel()} tokens are less than a window of {WINDOW}")
    kl = agree = 0.0
    for batch in windows.split(_BATCH):
        right, judged = (F.log_softmax(m(batch).logits.double(), dim=-1) for m in (reference, model))
        kl += F.kl_div(judged, right, log_target=True, reduction="sum").item()
        agree += (right.argmax(-1) == judged.argmax(-1)).sum().item()
    return Quality(kl / windows.numel(), agree / windows.numel(), windows.numel())


def run(model_path: str) -> GateResult:
    """Runs the gate on a folder that holds a dense model, its tokenizer and `held-out.txt`.

    Args:
        model_path: such as `demo_model_path()`.

    Returns:
        The figures.
    """
    text = (Path(model_path) / "held-out.txt").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]

    def load(config: MXFP4Config | None) -> Any:
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, quantization_config=config)

    dense = load(None)
    default, floor = (compare(dense, load(MXFP4Config(scale_rule=rule)), tokens) for rule in ("mse", "floor"))
    return GateResult(default, floor)

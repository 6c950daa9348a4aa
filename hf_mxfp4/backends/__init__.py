"""Implementations of the ops, one module a backend, and the one function that chooses between them."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import NamedTuple

import torch

from . import cpu, triton

BACKENDS = ("reference", "cpu", "triton")
"""Every backend's name."""

BACKEND_VARIABLE = "HF_MXFP4_BACKEND"
"""The environment variable that chooses the backend for the whole process."""


class Choice(NamedTuple):
    """A backend and why it was chosen."""

    name: str
    reason: str


def unavailable(name: str, device_type: str | None = None) -> str | None:
    """Why the backend `name` cannot be used here (on a device of a type, if one is given), or None if it can."""
    if name == "cpu" and device_type not in (None, "cpu"):
        return f"it is for tensors on cpu, and these are on {device_type}"
    if name == "cpu":
        return cpu.unavailable()
    return triton.unavailable(device_type) if name == "triton" else None


@cache
def _say_once(reason: str) -> None:
    logging.getLogger("hf_mxfp4").warning("packed experts run in plain torch, which is slow: %s", reason)


def choose(requested: str, device_type: str) -> Choice:
    """Chooses the backend for packed experts on a device.

    Args:
        requested: a backend's name, or "auto". The environment variable HF_MXFP4_BACKEND, where set, comes before it.
        device_type: such as "cpu" or "cuda".

    Returns:
        The backend and the reason in words.

    Raises:
        ValueError: a name that is no backend's, or a backend that cannot be used here.
    """
    variable = os.environ.get(BACKEND_VARIABLE, "")
    name, source = (variable, BACKEND_VARIABLE) if variable else (requested, "backend")
    if name == "auto":
        best = "cpu" if device_type == "cpu" else "triton"
        if (why := unavailable(best, device_type)) is None:
            kind = "native kernel" if best == "cpu" else "Triton kernels"
            return Choice(best, f"{kind}, {_code(best, device_type)}")
        _say_once(why)
        return Choice("reference", f"plain torch on {device_type}: {why}")
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected auto, {', '.join(BACKENDS)}")
    if (why := unavailable(name, device_type)) is not None:
        raise ValueError(f"{source} is {name!r}, but {why}")
    return Choice(name, f"asked for by {source}" + (f", {_code(name, device_type)}" if name != "reference" else ""))


def _code(name: str, device_type: str) -> str:
    """What a backend's code on a device is for."""
    return cpu.instruction_set() if name == "cpu" else triton.family(torch.device(device_type))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def choose_name(requested: str, device_type: str) -> str:
    """The name that `choose` gives, for code that torch.compile traces: which backend runs is settled then."""
    return choose(requested, device_type).name

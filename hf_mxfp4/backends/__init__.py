"""Implementations of the ops, one module a backend, and the one function that chooses between them."""

from __future__ import annotations

import os
from typing import NamedTuple

BACKENDS = ("reference", "cpu", "triton")
"""Every backend's name. `cpu` and `triton` are not part of this version; asking for one says so."""

BACKEND_VARIABLE = "HF_MXFP4_BACKEND"
"""The environment variable that chooses the backend for the whole process."""


class Choice(NamedTuple):
    """A backend and why it was chosen."""

    name: str
    reason: str


def unavailable(name: str) -> str | None:
    """Why the backend `name` cannot be used here, or None if it can."""
    if name == "reference":
        return None
    kernels = {"cpu": "native CPU kernel", "triton": "Triton kernels"}
    return f"this version of hf_mxfp4 has no {kernels[name]}"


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
        return Choice(
            "reference", f"plain torch on {device_type}: {unavailable('cpu' if device_type == 'cpu' else 'triton')}"
        )
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected auto, {', '.join(BACKENDS)}")
    if (why := unavailable(name)) is not None:
        raise ValueError(f"{source} is {name!r}, but {why}")
    return Choice(name, f"asked for by {source}")

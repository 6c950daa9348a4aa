"""Versions, what is usable on this machine, what is not and why, and what to install."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

import torch
from packaging.requirements import Requirement

from .. import __version__, demo_model_path
from ..backends import BACKEND_VARIABLE, BACKENDS, choose, cpu, unavailable

_OPTIONAL = {
    "triton": "compiles the kernels for GPUs; torch for CUDA and ROCm brings its own",
    "compressed-tensors": "needed by stock Transformers, not by hf_mxfp4, to read checkpoints saved in that layout",
    "peft": "adapters on the dense parts of a model: pip install peft",
    "llama-cpp-python": "a peer in hf-mxfp4 bench: pip install 'hf_mxfp4[peers]', which compiles for minutes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Prints the findings; 1 if something that is needed is missing or too old."""
    failures = 0
    print(f"hf_mxfp4 {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"model for the demo: {demo_model_path()}")
    print("\nneeded")
    for line in metadata.requires("hf_mxfp4") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        failures += not fits
        print(f"  {requirement.name:20} {found or 'missing':16} {_advice(requirement, fits)}")
    print("\noptional")
    for name, use in _OPTIONAL.items():
        print(f"  {name:20} {_version(name) or 'not installed':16} {use}")
    print("\ndevices")
    print(f"  cpu                  usable, {torch.get_num_threads()} threads")
    for kind in ("cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        usable = module is not None and module.is_available()
        reason = "usable" if usable else f"not usable: torch {torch.__version__} finds none"
        print(f"  {kind:20} {reason}")
    print("\nbackends for packed experts")
    variable = os.environ.get(BACKEND_VARIABLE)
    try:
        for name in BACKENDS:
            print(f"  {name:20} {unavailable(name) or _usable(name)}")
        chosen = ", because ".join(choose("auto", "cpu"))
    except ValueError as error:
        chosen, failures = str(error), failures + 1
    print(f"  {BACKEND_VARIABLE} is {variable or 'not set'}; on cpu: {chosen}")
    print("\nsomething has to be put right" if failures else "\nall that is needed is here")
    return 1 if failures else 0


def _usable(name: str) -> str:
    if name == "reference":
        return "usable on every device"
    if name == "triton":
        return "usable on GPUs" if unavailable(name, "cpu") else "usable in Triton's interpreter, for tests"
    variable = os.environ.get(cpu.ISA_VARIABLE)
    return f"usable on cpu, with {cpu.instruction_set()}; {cpu.ISA_VARIABLE} is {variable or 'not set'}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _advice(requirement: Requirement, fits: bool) -> str:
    return f"ok ({requirement.specifier})" if fits else f"pip install '{requirement.name}{requirement.specifier}'"

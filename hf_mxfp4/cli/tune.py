"""Find launch configurations of the Triton kernels on this GPU, and write them into the launch table."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import configs  # type: ignore[attr-defined]  # configs lies beside the package
from ..backends import triton, unavailable
from ..bench import tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("--shapes", nargs="+", default=["gpt-oss-20b"], metavar="NAME", help="of configs (default gpt-oss-20b)")
    add("--tokens", nargs="+", type=int, default=[1, 8, 64, 512, 2048], metavar="T", help="tokens of each batch")
    add("--device", default="cuda", help="default cuda")
    add("--most", type=int, default=None, metavar="N", help="candidates to try for each batch (default all)")
    add("--table", type=Path, default=None, metavar="FILE", help="to read and write (default the installed one)")
    add("--quiet", action="store_true", help="no progress bar, no line for a candidate")


def run(options: argparse.Namespace) -> int:
    """Times, prints what was chosen, and writes after each batch."""
    device = torch.device(options.device)
    if (why := unavailable("triton", device.type)) is not None:
        raise ValueError(f"nothing can be tuned on {device}: {why}")
    if min(options.tokens) < 1 or (options.most is not None and options.most < 1):
        raise ValueError("--tokens and --most are at least 1")
    path = options.table or Path(str(files("hf_mxfp4.configs").joinpath("launch.json")))
    table: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    family = triton.family(device)
    for name in options.shapes:
        try:
            shape = configs.shape(name)
        except KeyError as error:
            raise ValueError(error.args[0]) from error
        for tokens in options.tokens:
            tiles = list(tune.candidates(tokens * shape.experts_per_token / shape.num_experts))[: options.most]
            bar = tqdm(tiles, desc=f"{name}, {tokens} tokens", disable=options.quiet)
            show = (lambda line: None) if options.quiet else bar.write
            entry = tune.tune(shape, tokens, device, bar, show)
            _put(table.setdefault(family, []), entry)
            write(path, table)
            print(f"{family}, {name}, {tokens} tokens: {entry['route']}, {entry['first']}, {entry['second']}")
    print(f"written to {path}")
    return 0


def _put(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Adds an entry in the place of one for the same batch and layer."""
    key = ("tokens_per_expert", "hidden_size", "intermediate_size")
    same = [index for index, old in enumerate(entries) if all(old.get(part) == entry[part] for part in key)]
    for index in reversed(same):
        del entries[index]
    entries.append(entry)


def write(path: Path, table: dict[str, list[dict[str, Any]]]) -> None:
    """Writes a launch table, an entry a line, whole or not at all."""
    parts = []
    for family, entries in sorted(table.items()):
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        parts.append(f" {json.dumps(family)}: [\n{lines}\n ]")
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    beside.replace(path)

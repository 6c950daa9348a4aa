"""Time packed experts beside Transformers in bfloat16 and llama.cpp, and beside what the machine can do at most."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .. import bench, configs, demo_model_path  # type: ignore[attr-defined]  # configs lies beside the package
from ..bench import ggml, timing

_SHAPES = ("gpt-oss-20b", "qwen3-30b-a3b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    defaults = bench.LayerOptions()
    add = parser.add_argument
    add("--shapes", nargs="+", default=_SHAPES, metavar="NAME", help=f"of configs (default {' '.join(_SHAPES)})")
    add("--tokens", nargs="+", type=int, default=defaults.tokens, metavar="T", help="tokens of each case")
    add("--threads", nargs="+", type=int, default=None, metavar="N", help="default 1 and 2, where there are two cores")
    add("--sides", nargs="+", default=timing.SIDES, choices=timing.SIDES, metavar="SIDE", help=", ".join(timing.SIDES))
    add("--rounds", type=int, default=None, help="at most, in each case (default 200; 3 with --model)")
    add("--seconds", type=float, default=defaults.seconds, help="about, for each case (default %(default)s)")
    add("--backend", default="auto", help="of the packed experts (default %(default)s)")
    add("--model", default=None, help="end to end instead: a folder, an id, 'tiny' (the shipped one) or '1b' (random)")
    add("--prompt", type=int, default=512, help="tokens of the prompt, with --model (default %(default)s)")
    add("--new", type=int, default=64, help="tokens to generate, with --model (default %(default)s)")
    add("--json", type=Path, default=None, metavar="FILE", help="also write everything there")


def run(options: argparse.Namespace) -> int:
    """Measures and prints; an error if a side is wrong."""
    threads = tuple(options.threads or range(1, min(2, os.cpu_count() or 1) + 1))
    _check_numbers(options, threads)
    where = bench.where(options.backend)
    print("; ".join(f"{name} {value}" for name, value in where.items()))
    print("One thread: process CPU time. More: wall time.\n")
    found: dict[str, Any] = {"where": where, "cases": [], "models": []}
    if options.model is not None:
        found["models"] = _model(options, threads)
    else:
        if (missing := ggml.unavailable()) is not None:
            print(missing + "\n")
        for name in options.shapes:
            found["cases"] += _layer(name, options, threads)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _check_numbers(options: argparse.Namespace, threads: tuple[int, ...]) -> None:
    numbers = {"--tokens": options.tokens, "--threads": threads, "--prompt": [options.prompt]}
    numbers["--rounds"] = [1 if options.rounds is None else options.rounds]
    for option, values in numbers.items():
        if min(values) < 1:
            raise ValueError(f"{option} has {min(values)}; expected at least 1")
    if options.new < 2:
        raise ValueError(f"--new is {options.new}; expected at least 2")
    if not options.seconds > 0:
        raise ValueError(f"--seconds is {options.seconds}; expected more than 0")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {options.json.absolute().parent}")


def _layer(name: str, options: argparse.Namespace, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    try:
        shape = configs.shape(name)
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    defaults = bench.LayerOptions()
    chosen = bench.LayerOptions(
        tuple(options.tokens), threads, tuple(options.sides), options.rounds or defaults.rounds, options.seconds,
        options.backend,
    )  # fmt: skip
    cases: list[bench.Case] = []
    for case in bench.measure_layer(name, shape, chosen):
        cases.append(case)
        print(f"{name}: {case.threads} thread(s), {case.tokens} tokens measured", file=sys.stderr)
    for count in sorted(threads):
        print(f"\n{name}: {shape.num_experts} experts, {shape.experts_per_token} a token, "
              f"{shape.hidden_size} x {shape.intermediate_size}; {count} thread(s)\n")  # fmt: skip
        own = [case for case in cases if case.threads == count]
        _print_table(_main_rows(own))
        print("\nMicroseconds a layer, median, and relative error against float64\n")
        _print_table(_side_rows(own))
        print()
        for line in _machine_lines(own):
            print(line)
    print()
    return [case.as_dict() for case in cases]


def _main_rows(cases: list[bench.Case]) -> Iterable[list[str]]:
    """The packed layer's figures, and how many times as long each peer takes."""
    peers = _peers(cases)
    yield [
        "T", "us", "best us", "GB/s", "of read, best", "median", "GFLOP/s", "of peak", "of linear", "error",
        *(f"x {peer}" for peer in peers),
    ]  # fmt: skip
    for case in cases:
        ours, flops = case.series[timing.OURS], case.flop_rates
        yield [
            str(case.tokens),
            f"{1e6 * ours.median:.0f}",
            f"{1e6 * ours.best:.0f}",
            f"{statistics.median(ours.rates):.1f}",
            _percent(case.share(timing.READ, ours.rates, max)),
            _percent(case.share(timing.READ, ours.rates, statistics.median)),
            f"{statistics.median(flops):.1f}",
            _percent(case.share(timing.MULTIPLY, flops, statistics.median)),
            _percent(case.share(timing.LINEAR, flops, statistics.median)),
            f"{ours.error:.1e}",
            *(_times(case.series[peer].over(ours) if peer in case.series else None) for peer in peers),
        ]


def _side_rows(cases: list[bench.Case]) -> Iterable[list[str]]:
    names = [timing.OURS, *_peers(cases)]
    yield ["T", *names]
    for case in cases:
        cells = []
        for name in names:
            one = case.series.get(name)
            cells.append("-" if one is None else f"{1e6 * one.median:.0f} ({one.error:.1e})")
        yield [str(case.tokens), *cells]


def _peers(cases: list[bench.Case]) -> list[str]:
    named = dict.fromkeys(name for case in cases for name, one in case.series.items() if one.error is not None)
    return [name for name in named if name != timing.OURS]


def _machine_lines(cases: list[bench.Case]) -> Iterable[str]:
    """What the machine could do in these cases; how far the bandwidth's medians of the cases differ."""
    units = {timing.READ: "GB/s read", timing.MULTIPLY: "GFLOP/s multiplied in registers"}
    units[timing.LINEAR] = "GFLOP/s in torch's dense bfloat16 F.linear of 512 tokens and one expert's first projection"
    for name, unit in units.items():
        medians = [statistics.median(case.series[name].rates) for case in cases if name in case.series]
        if not medians:
            yield f"- {unit}: probed by the native backend, which is not here"
            continue
        best = max(rate for case in cases for rate in case.series[name].rates)
        spread = max(medians) / min(medians) - 1
        quiet = "quiet" if spread < 0.05 else "not quiet"
        more = f"; spread of the cases' medians {spread:.1%}: {quiet}" if name == timing.READ else ""
        yield f"{statistics.median(medians):.1f} {unit}, best {best:.1f}{more}"


def _model(options: argparse.Namespace, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = demo_model_path() if options.model == "tiny" else options.model
    speeds = bench.measure_model(
        source, threads, prompt=options.prompt, new=options.new, rounds=options.rounds or 3, backend=options.backend
    )
    first = speeds[0]
    print(f"{options.model}: {first.parameters / 1e6:.1f} M parameters; experts differ by {first.error:.1e} at most")
    print(f"prompt of {first.prompt} tokens, {first.new} generated; tokens a second, median\n")
    rows = [["threads", "", "packed", "bfloat16", "ratio"]]
    for speed in speeds:
        for kind, rates in (("prefill", speed.prefill), ("decode", speed.decode)):
            medians = [f"{statistics.median(rates[side]):.1f}" for side in ("packed", "bfloat16")]
            rows.append([str(speed.threads), kind, *medians, f"{speed.ratio(kind):.2f}"])
    _print_table(rows)
    return [vars(speed) for speed in speeds]


def _print_table(rows: Iterable[list[str]]) -> None:
    lines = list(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"

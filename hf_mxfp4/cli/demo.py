"""Quantize a model's experts, generate, save, reload, and check all of it; offline with the model that is shipped."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

from .. import MXFP4Config, NotPackedError, assert_packed, demo_model_path, gate, packed_report

_BACKEND_ERROR_LIMIT = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", default=None, help="folder or id of a dense MoE model; by default the shipped one")
    parser.add_argument("--prompt", default="ROMEO.\n", help="what to continue")
    parser.add_argument("--tokens", type=int, default=40, help="how many tokens to generate (default %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Runs the demo; 1 if a check fails."""
    if options.tokens < 1:
        raise ValueError(f"--tokens is {options.tokens}; expected at least 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options.prompt.encode("utf-8")  # as text that came in another encoding cannot be
    source = demo_model_path() if options.model is None else options.model
    tokenizer = AutoTokenizer.from_pretrained(source)
    failures: list[str] = []

    dense = AutoModelForCausalLM.from_pretrained(source)
    if not _packed_failures(dense):  # the source is packed
        dense.dequantize()
    dense_text, dense_speed = _generate(dense, tokenizer, options)
    dense_bytes = packed_report(dense).bytes
    del dense
    packed = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4Config())
    packed_text, packed_speed = _generate(packed, tokenizer, options)
    for kind, text, speed in (("dense", dense_text, dense_speed), ("packed", packed_text, packed_speed)):
        print(f"--- {kind} experts, {speed:.1f} tokens/s\n{text}\n")
        if len(text) <= len(options.prompt):
            failures.append(f"the {kind} model generated nothing")

    report = packed_report(packed, check=True)
    print(f"--- packed report\n{report}\n{dense_bytes / report.bytes:.2f} times smaller than dense\n")
    failures += _packed_failures(packed)
    failures += [f"{row.name}: error {row.error}" for row in report.rows if not (row.error or 0) < _BACKEND_ERROR_LIMIT]

    changed = _changed_by_reload(packed)
    print(f"--- saved and reloaded: {'all bytes equal' if not changed else ', '.join(changed)}\n")
    failures += [f"{name} changed between save and reload" for name in changed]

    if options.model is None:
        failures += _gate(source)
    for failure in failures:
        print(f"FAILED: {failure}")
    print("demo failed" if failures else "demo passed")
    return 1 if failures else 0


def _generate(model: Any, tokenizer: Any, options: argparse.Namespace) -> tuple[str, float]:
    """The prompt with its greedy continuation, and tokens a second."""
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    start = time.perf_counter()
    text: str = generator(options.prompt, max_new_tokens=options.tokens, do_sample=False)[0]["generated_text"]
    seconds = time.perf_counter() - start
    count = len(tokenizer(text).input_ids) - len(tokenizer(options.prompt).input_ids)
    return text, count / seconds


def _packed_failures(model: Any) -> list[str]:
    try:
        assert_packed(model)
    except NotPackedError as error:
        return [str(error)]
    return []


def _changed_by_reload(model: Any) -> list[str]:
    """Tensors that a save and a plain reload do not give back bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        before, after = model.state_dict(), type(model).from_pretrained(folder).state_dict()
        return sorted(
            name
            for name in {*before, *after}
            if name not in before or name not in after or not _same_bits(before[name], after[name])
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)))


def _gate(source: str) -> list[str]:
    result = gate.run(source)
    default, floor = result.default, result.floor
    print(f"--- quality gate, {default.tokens} held-out tokens, against the dense model in float32")
    print(f"KL of the default rule    {default.kl:.4f} nats/token (at most {gate.KL_LIMIT:.4f})")
    print(f"top-1 agreement           {default.top1:.4f} (at least {gate.TOP1_LIMIT})")
    print(f"KL over the floor rule's  {default.kl / floor.kl:.3f} (at most {gate.KL_TO_FLOOR_LIMIT})\n")
    return result.failures()

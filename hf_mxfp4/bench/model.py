"""End to end: tokens a second of `generate`, with packed experts beside the same experts in bfloat16.

Both models come from `from_pretrained` with `MXFP4Config()`; `dequantize` then makes one of them the stock model in
bfloat16, so that both compute with the same weights. Decoding is greedy and always goes on to the last token asked for.
The prefill is the time to the first new token, the decode rate that of the tokens after it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ..experts import MXFP4Experts, find_experts
from ..quantizer import MXFP4Config
from .sides import relative_error

_CHECK_TOKENS = 16
_CHECK_LIMIT = 2e-2

ONE_BILLION = Qwen3MoeConfig(
    num_hidden_layers=12, num_experts=64, num_experts_per_tok=8, hidden_size=1024, moe_intermediate_size=384,
    intermediate_size=384, num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32768,
    tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
"""A MoE of about 1 B parameters, 0.9 B of them in experts, in the shape of Qwen3-30B-A3B."""


@dataclass
class ModelSpeed:
    """Speeds of a packed model and of the same in bfloat16, by round.

    Attributes:
        threads: that ran it.
        prompt: its tokens.
        new: tokens generated.
        parameters: of the model in bfloat16.
        error: the largest relative difference between packed and bfloat16 experts of a layer.
        prefill: tokens a second, by "packed" and "bfloat16".
        decode: the same of what follows the first new token.
    """

    threads: int
    prompt: int
    new: int
    parameters: int
    error: float
    prefill: dict[str, list[float]] = field(default_factory=lambda: {"packed": [], "bfloat16": []})
    decode: dict[str, list[float]] = field(default_factory=lambda: {"packed": [], "bfloat16": []})

    def ratio(self, kind: str) -> float:
        """How many times as fast the packed one is, the median of the rounds, for "prefill" or "decode"."""
        rates: dict[str, list[float]] = getattr(self, kind)
        return statistics.median(p / b for p, b in zip(rates["packed"], rates["bfloat16"], strict=True))


class _Stopwatch:
    """A streamer that notes when the prompt and each token come by."""

    def __init__(self, threads: int) -> None:
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        del value
        self.times.append(self._clock())

    def end(self) -> None:
        pass


def measure_model(
    source: str, threads: tuple[int, ...], *, prompt: int = 512, new: int = 64, rounds: int = 3, backend: str = "auto"
) -> list[ModelSpeed]:
    """Measures a model.

    Args:
        source: a folder or an id, or "1b" for a random one of about 1 B parameters.
        threads: of each measurement.
        prompt: tokens of it.
        new: tokens to generate, 2 at least.
        rounds: of both models in turn, after one that does not count.
        backend: of the packed experts.

    Returns:
        Speeds for each number of threads.

    Raises:
        RuntimeError: packed experts that do not compute what those in bfloat16 do.
    """
    if source == "1b":
        with tempfile.TemporaryDirectory() as folder:
            _write_random(folder)
            packed, dense = _load(folder, backend)
    else:
        packed, dense = _load(source, backend)
    before = torch.get_num_threads()
    speeds = []
    try:
        with torch.no_grad():
            error = _check(packed, dense)
            ids = torch.randint(0, packed.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
            for count in sorted(threads):
                torch.set_num_threads(count)
                parameters = sum(parameter.numel() for parameter in dense.parameters())
                speed = ModelSpeed(count, prompt, new, parameters, error)
                for number in range(rounds + 1):
                    for kind, model in (("packed", packed), ("bfloat16", dense)):
                        prefill, decode = _generate(model, ids, new, count)
                        if number:
                            speed.prefill[kind].append(prefill)
                            speed.decode[kind].append(decode)
                speeds.append(speed)
    finally:
        torch.set_num_threads(before)
    return speeds


def _write_random(folder: str) -> None:
    """Saves a random model. Embeddings of deviation 1 keep tokens apart, or all would go to the same experts."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = Qwen3MoeForCausalLM(ONE_BILLION)
    finally:
        torch.set_default_dtype(before)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)


def _load(source: str, backend: str) -> tuple[Any, Any]:
    """The packed model, and another with what it holds decoded."""
    packed, dense = (
        AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=MXFP4Config(backend=backend)
        ).eval()
        for _ in range(2)
    )
    dense.dequantize()
    return packed, dense


def _check(packed: Any, dense: Any) -> float:
    """The largest relative difference of a layer's experts, on random tokens."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    config = packed.config.get_text_config()
    pairs = list(zip(find_experts(packed), find_experts(dense), strict=True))
    if not pairs:
        raise ValueError("the model has no experts")
    for (name, ours), (_, stock) in pairs:
        if not isinstance(ours, MXFP4Experts):
            raise RuntimeError(f"{name} is not packed; nothing was timed")
        x = torch.randn(_CHECK_TOKENS, ours.dense_shape("down_proj")[-2], generator=generator).bfloat16()
        routes = torch.rand(_CHECK_TOKENS, ours.num_routed, generator=generator).topk(config.num_experts_per_tok)
        weights = routes.values.softmax(dim=-1).bfloat16()
        off = relative_error(ours(x, routes.indices, weights), stock(x, routes.indices, weights))
        if not off <= _CHECK_LIMIT:
            raise RuntimeError(f"{name}: packed experts are off by {off:.1e} from bfloat16; nothing was timed")
        worst = max(worst, off)
    return worst


def _generate(model: Any, ids: Tensor, new: int, threads: int) -> tuple[float, float]:
    """Tokens a second of prefill and decode."""
    watch = _Stopwatch(threads)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), streamer=watch, do_sample=False, min_new_tokens=new,
        max_new_tokens=new, pad_token_id=0,
    )  # fmt: skip
    if out.shape[1] != ids.shape[1] + new or len(watch.times) != new + 1:
        raise RuntimeError(f"{out.shape[1] - ids.shape[1]} tokens were generated, not {new}")
    start, first, last = watch.times[0], watch.times[1], watch.times[-1]
    return ids.shape[1] / (first - start), (new - 1) / (last - first)

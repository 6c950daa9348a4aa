"""What works where, on a CPU: packed experts, stock mxfp4, bitsandbytes and torchao with what surrounds Transformers.

    pip install -c constraints.txt -e '.[test,ecosystem]'
    python benchmarks/ecosystem.py [--sides hf_mxfp4 ...] [--rows pickle ...] [--timeout 120] [--verbose]

Prints a Markdown table. Every cell is a process of its own: "yes" where the thing was done and, if it should change no
result, the result is that of the same model without it (generation, pipelines, quantizing on load and GGUF only have to
run); "yes, experts at 16 bits" where it was done, but with experts that are not in 4 bits; "no" and the error's first
words where it was not. A side whose package is missing says "not installed".

The model is the package's small Qwen3-MoE; stock mxfp4, which knows no other model, has a random gpt-oss, dense and in
MXFP4. For plans of several processes all sides have random models of four heads. torch.compile has the backend
aot_eager, which traces as the default one does and then runs what it has traced. The bytes that are read from disk are
those that accelerate puts in place for a token, and the hooks of this package by their own count.

Each side has the setting in which most of it works on a CPU:

- stock mxfp4: the checkpoint's own config. Its kernel needs `pip install kernels` and a download from the Hub.
- bitsandbytes: 4-bit NF4 by `BitsAndBytesConfig`, which leaves experts alone; and once more with
  `bitsandbytes.nn.parametrize.replace_parameter_4bit` called on each experts module after the model was loaded. Its
  weights are laid out anew for the CPU by the first forward, after which PEFT merges wrongly; before it, rightly.
- torchao int4: `PrototypeInt4WeightOnlyConfig` on linear layers; `Int4WeightOnlyConfig` has no CPU code, and neither
  takes experts. torchao int8: `Int8WeightOnlyConfig` on linear layers and, by `FqnToConfig`, on experts, run with
  `experts_implementation="eager"`, without which they do not run and with which no MoE compiles in one graph.

GGUF files are those that this package writes.

Run with torch 2.13.0, Transformers 5.24.0, accelerate 1.15.0, peft 0.21.2, bitsandbytes 0.50.2, torchao 0.18.0.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from accelerate import hooks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, Qwen3MoeConfig, pipeline
from transformers.distributed import DistributedConfig

FORK = multiprocessing.get_context("fork")
TOLERANCE = 0.03  # of the logits' norm, for results whose sums may have another order, in bfloat16
MERGED = 0.15  # likewise where merged weights are rounded anew
EXPERTS = r"re:.*\.experts\.(gate_up_proj|down_proj)"


class Side(NamedTuple):
    """One way to hold a model in few bits.

    Attributes:
        packages: what must be installed.
        config: makes the quantization config for a dense checkpoint.
        config_of_packed: makes that for `packed`, None for none.
        dense: folder of the dense model, below the working folder.
        packed: folder of the model that the other rows load, dense where the side quantizes on load.
        options: of every `from_pretrained`.
        finish: called on a loaded model.
    """

    packages: tuple[str, ...]
    config: Callable[[], Any]
    config_of_packed: Callable[[], Any]
    dense: str = "qwen"
    packed: str = "qwen"
    options: Mapping[str, Any] = MappingProxyType({})
    finish: Callable[[nn.Module], None] = lambda model: None


class Try:
    """A side in a working folder."""

    def __init__(self, side: Side, work: Path) -> None:
        self.side, self.work = side, work

    def load(self, folder: Path | str | None = None, **options: Any) -> Any:
        """The model as the side holds it, or what it has saved in a folder."""
        if folder is None:
            folder, config = self.work / self.side.packed, self.side.config_of_packed()
            options |= {} if config is None else {"quantization_config": config}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **self.side.options, **options)
        self.side.finish(model)
        return model.eval()

    def saved(self) -> Path:
        """A folder that the side has saved."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        self.load().save_pretrained(folder)
        return folder


def tokens() -> Tensor:
    """Ids int64 [2, 13], always the same."""
    return torch.randint(3, 250, (2, 13), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    """Of `tokens()` or other ids, in float32."""
    return model(tokens() if ids is None else ids, use_cache=False).logits.float()


def same(got: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Raises unless two results differ by no more than a part of the second one's norm."""
    distance = float((got - expected).norm() / expected.norm())
    if not distance <= tolerance:
        raise ArithmeticError(f"results differ by {distance:.2g} of their norm")


def bytes_of(tensor: Tensor) -> int:
    """What a tensor takes, and of one that is made of others what they take; of one that is split, this part."""
    if isinstance(tensor, DTensor):
        return bytes_of(tensor.to_local())
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    state = getattr(tensor, "quant_state", None)
    return tensor.nbytes + (0 if state is None else state.absmax.nbytes)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold experts, one a layer."""
    found = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    if not found:
        raise LookupError("the model has no experts module")
    return found


def expert_bytes(model: nn.Module) -> int:
    """Of all weights of experts with their scales; without biases and adapters."""
    total = 0
    for experts in experts_of(model):
        total += sum(bytes_of(p) for n, p in experts.named_parameters() if "bias" not in n and "lora_" not in n)
        states = [state for m in experts.modules() if (state := vars(m).get("quant_state")) is not None]
        total += sum(state.absmax.nbytes for state in states)  # of bitsandbytes, beside a parameter
    return total


def bits(model: Any) -> float:
    """Of an expert's weight, from the bytes that the model holds."""
    config = model.config
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    weights = 3 * config.num_hidden_layers * config.num_local_experts * config.hidden_size * inner
    return 8 * expert_bytes(model) / weights


def yes(model: Any, more: str = "") -> str:
    """The cell for something that was done with a model."""
    held = bits(model)
    return "yes" + (f", {more}" if more else "") + ("" if held < 5 else f", experts at {held:.3g} bits")


# Rows


def bits_a_weight(trial: Try) -> str:
    """Measured, with scales."""
    return f"{bits(trial.load()):.3g}"


def generates(trial: Try) -> str:
    """Five tokens."""
    model = trial.load()
    model.generate(tokens(), max_new_tokens=5, do_sample=False)
    return yes(model)


def quantizes_on_load(trial: Try) -> str:
    """From the dense bfloat16 checkpoint."""
    model = trial.load(trial.work / trial.side.dense, quantization_config=trial.side.config())
    logits(model)
    return yes(model)


def saves_and_reloads(trial: Try) -> str:
    """By `save_pretrained` and `from_pretrained`; logits are equal."""
    expected, model = logits(trial.load()), trial.load(trial.saved())
    same(logits(model), expected)
    return yes(model)


def on_disk(trial: Try, folder: Path | None) -> Any:
    """The model with its decoder layers on disk."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers": "disk"}
    return trial.load(folder, device_map=places, offload_folder=tempfile.mkdtemp(dir=trial.work))


def offloads(trial: Try) -> str:
    """Loaded with decoder layers on disk; logits are equal."""
    expected, model = logits(trial.load()), on_disk(trial, None)
    same(logits(model), expected)
    return yes(model)


def offloads_what_it_saved(trial: Try) -> str:
    """Likewise, from a folder that the side has saved."""
    expected, model = logits(trial.load()), on_disk(trial, trial.saved())
    same(logits(model), expected)
    return yes(model)


def reads_picked_experts(trial: Try) -> str:
    """From what accelerate puts in place for a token, and from what the package's hooks have counted."""
    model, token, brought = on_disk(trial, None), torch.tensor([[77]]), 0
    stock = hooks.set_module_tensor_to_device

    def count(module: nn.Module, name: str, *args: Any, value: Tensor | None = None, **kwargs: Any) -> Any:
        nonlocal brought
        if value is not None and type(module).__name__.endswith("Experts") and "bias" not in name:
            brought += bytes_of(value)
        return stock(module, name, *args, value=value, **kwargs)

    hooks.set_module_tensor_to_device = count
    logits(model, token)
    total = expert_bytes(model)
    for experts in experts_of(model):
        one = sum(p.nbytes for n, p in experts.named_parameters() if "bias" not in n) // model.config.num_local_experts
        brought += getattr(experts._hf_hook, "reads", 0) * one
    part = f"{100 * brought / total:.0f} % of them for a token"
    return yes(model, part) if brought < total else f"no: {part}"


def compiles(trial: Try) -> str:
    """A forward of the whole model in one graph."""
    model = trial.load()
    expected = logits(model)
    same(logits(torch.compile(model, fullgraph=True, backend="aot_eager")), expected, TOLERANCE)
    return yes(model)


def adapted(trial: Try, **targets: Any) -> Any:
    """The model with fresh LoRA adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(trial.load(), LoraConfig(r=4, lora_alpha=8, **targets))


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
BOTH = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Weights of experts by name, those that are made of other tensors as what they stand for."""
    found = {f"{i} {n}": p.detach() for i, m in enumerate(experts_of(model)) for n, p in m.named_parameters()}
    return {n: p.dequantize() if hasattr(p, "__tensor_flatten__") else p for n, p in found.items() if "lora_" not in n}


def trains(trial: Try, **targets: Any) -> str:
    """Ten steps; the loss falls and bytes of experts stay."""
    model, batch = adapted(trial, **targets), tokens()
    before = copy.deepcopy(frozen(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(model(batch, labels=batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    if not losses[-1] < losses[0] - 0.1:
        raise ArithmeticError(f"the loss goes from {losses[0]:.2f} to {losses[-1]:.2f}")
    after = frozen(model)
    if after.keys() != before.keys() or not all(torch.equal(after[name], before[name]) for name in before):
        raise ArithmeticError("frozen experts have changed")
    return yes(model.base_model.model)


def trains_attention(trial: Try) -> str:
    """Adapters on two projections."""
    return trains(trial, **ATTENTION)


def trains_experts(trial: Try) -> str:
    """Adapters on both parameters of experts."""
    return trains(trial, **BOTH)


def merges(trial: Try, **targets: Any) -> str:
    """Random adapters, after a forward with them; the merged model computes what they did."""
    model = adapted(trial, **targets)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    expected = logits(model)
    merged = model.merge_and_unload()
    same(logits(merged), expected, MERGED)
    return yes(merged)


def merges_attention(trial: Try) -> str:
    """Of adapters on two projections."""
    return merges(trial, **ATTENTION)


def merges_experts(trial: Try) -> str:
    """Of adapters on both parameters of experts."""
    return merges(trial, **BOTH)


def pipes(trial: Try) -> str:
    """A text-generation pipeline of the loaded model."""
    model, tokenizer = trial.load(), AutoTokenizer.from_pretrained(trial.work / "qwen")
    pipeline("text-generation", model=model, tokenizer=tokenizer)("ROMEO.\n", max_new_tokens=5)
    return yes(model)


def has_a_static_cache(trial: Try) -> str:
    """The tokens are those of a dynamic cache."""
    model, options = trial.load(), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(tokens(), **options)
    if not torch.equal(model.generate(tokens(), **options, cache_implementation="static"), expected):
        raise ArithmeticError("other tokens than with a dynamic cache")
    return yes(model)


def copies(trial: Try) -> str:
    """The copy's logits are equal."""
    model = trial.load()
    again = copy.deepcopy(model)
    same(logits(again), logits(model))
    return yes(again)


def pickles(trial: Try) -> str:
    """Logits of what comes back are equal."""
    model = trial.load()
    again = pickle.loads(pickle.dumps(model))
    same(logits(again), logits(model))
    return yes(again)


def is_split(trial: Try, **layout: int) -> str:
    """On two processes over gloo, against one; each must hold half of the experts."""
    trial = Try(trial.side._replace(dense=f"{trial.side.dense}-wide", packed=f"{trial.side.packed}-wide"), trial.work)
    one = trial.load()
    expected, held = logits(one), expert_bytes(one)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> str:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        model = trial.load(distributed_config=DistributedConfig(**layout))
        same(logits(model), expected, TOLERANCE)
        return yes(one, f"{100 * expert_bytes(model) / held:.0f} % of experts a process")

    cells = [start(rank, number) for number in range(2)]
    texts = [finish(*cell, 60) for cell in cells]
    return min(texts)  # "no" before "yes"


def is_split_by_tensor(trial: Try) -> str:
    """Transformers' plan for tensors."""
    return is_split(trial, tp_size=2)


def is_split_by_expert(trial: Try) -> str:
    """Transformers' plan for experts, and for the other tensors."""
    return is_split(trial, tp_size=2, ep_size=2)


def reads_gguf(trial: Try) -> str:
    """By `gguf_file=`, with the side's config."""
    config, file = trial.side.config_of_packed(), f"{trial.side.dense}.gguf"
    options = {} if config is None else {"quantization_config": config}
    model = trial.load(trial.work, gguf_file=file, **options)
    logits(model)
    return yes(model)


ROWS: dict[str, Callable[[Try], str]] = {
    "bits of an expert's weight": bits_a_weight,
    "generates on a CPU": generates,
    "quantizes on load": quantizes_on_load,
    "saves and reloads": saves_and_reloads,
    "`device_map` with CPU and disk": offloads,
    "the same, of what it saved": offloads_what_it_saved,
    "reads only picked experts from disk": reads_picked_experts,
    "`torch.compile(fullgraph=True)`": compiles,
    "LoRA on attention": trains_attention,
    "LoRA on experts (`target_parameters`)": trains_experts,
    "`merge_and_unload`, attention": merges_attention,
    "`merge_and_unload`, experts": merges_experts,
    "`pipeline`": pipes,
    "generates with a static cache": has_a_static_cache,
    "`deepcopy`": copies,
    "`pickle`": pickles,
    "tensor parallel, 2 processes": is_split_by_tensor,
    "expert parallel, 2 processes": is_split_by_expert,
    "GGUF with MXFP4 experts": reads_gguf,
}


# Sides


def ours() -> Any:
    """MXFP4 of this package."""
    from hf_mxfp4 import MXFP4Config

    return MXFP4Config()


def stock() -> Any:
    """MXFP4 of Transformers."""
    from transformers import Mxfp4Config

    return Mxfp4Config()


def nf4() -> Any:
    """bitsandbytes in 4 bits."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def replace_parameters(model: nn.Module) -> None:
    """Puts experts in 4 bits by the function that bitsandbytes has for parameters."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, name, quant_type="nf4")


def int4() -> Any:
    """torchao in 4 bits on linear layers."""
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=32))


def int8() -> Any:
    """torchao in 8 bits on linear layers and experts."""
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(FqnToConfig({EXPERTS: Int8WeightOnlyConfig(), "_default": Int8WeightOnlyConfig()}))


SIDES = {
    "hf_mxfp4": Side(("hf_mxfp4",), ours, ours),
    "stock mxfp4": Side((), stock, lambda: None, "gpt_oss", "gpt_oss-packed"),
    "bitsandbytes nf4": Side(("bitsandbytes",), nf4, nf4),
    "bitsandbytes nf4, experts by hand": Side(("bitsandbytes",), nf4, nf4, finish=replace_parameters),
    "torchao int4": Side(("torchao",), int4, int4),
    "torchao int8": Side(("torchao",), int8, int8, options={"experts_implementation": "eager"}),
}


# What runs them


def start(function: Callable[..., Any], *arguments: Any, verbose: bool = False) -> tuple[Any, Any]:
    """Begins a call in a process of its own: the process, and the end of a pipe that gets the cell's text."""
    mine, theirs = FORK.Pipe(duplex=False)

    def run() -> None:
        os.setpgid(0, 0)
        if not verbose:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        try:
            text = function(*arguments)
        except Exception as error:  # noqa: BLE001  # whatever a side raises is what its cell says
            traceback.print_exc()
            text = f"no: {type(error).__name__}: {error}"
        theirs.send(text)

    process = FORK.Process(target=run)
    process.start()
    theirs.close()
    return process, mine


def finish(process: Any, pipe: Any, timeout: float) -> Any:
    """What a call gave, or how it ended; its process and those it started are gone then."""
    result: Any = f"no: not done after {timeout:.0f} s"
    if pipe.poll(timeout):
        try:
            result = pipe.recv()
        except EOFError:
            process.join()
            result = f"no: ended with {process.exitcode}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return result


def one_line(text: str) -> str:
    """A cell without what Markdown takes for more than text, and short."""
    line = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text)).replace("|", "/").strip()
    return line if len(line) <= 110 else line[:107].rstrip() + "..."


def prepare(work: Path) -> str:
    """Folders of the models that sides load; the only part beside its own side that imports the package."""
    from transformers import AutoConfig

    import hf_mxfp4
    from hf_mxfp4.convert import convert

    (work / "qwen").symlink_to(hf_mxfp4.demo_model_path())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "vocab_size": AutoConfig.from_pretrained(work / "qwen").vocab_size,
    }
    sizes |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt_oss = GptOssConfig(**sizes, intermediate_size=128, num_local_experts=8, sliding_window=16)
    qwen = Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=8)
    for name, config in {"gpt_oss": gpt_oss, "gpt_oss-wide": gpt_oss, "qwen-wide": qwen}.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(work / name)
    for name in ("gpt_oss", "gpt_oss-wide"):
        packed = AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.bfloat16, quantization_config=ours())
        packed.save_pretrained(work / f"{name.removesuffix('-wide')}-packed{'-wide' * name.endswith('-wide')}")
    for name in ("qwen", "gpt_oss"):
        convert(work / name, work / f"{name}.gguf", "gguf", from_dense=True, progress=False)
    return "done"


def column(side: Side, names: list[str], work: Path, options: argparse.Namespace) -> dict[str, str]:
    """A side's cells, in a process that has imported what it needs once for all of them."""
    if any(importlib.util.find_spec(package) is None for package in side.packages):
        return dict.fromkeys(names, "not installed")
    for package in ("peft", *side.packages):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    cells = {}
    for name in names:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            own = Path(folder)
            for path in work.iterdir():
                if path != own and not path.name.startswith("tmp"):
                    (own / path.name).symlink_to(path)
            child = start(ROWS[name], Try(side, own), verbose=options.verbose)
            cells[name] = one_line(finish(*child, options.timeout))
    return cells


def main() -> None:
    """Makes the models, has each side tried and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES), metavar="SIDE")
    parser.add_argument("--rows", nargs="*", default=[""], help="parts of the names of rows")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a cell")
    parser.add_argument("--verbose", action="store_true", help="show what cells print, with their tracebacks")
    options = parser.parse_args()
    names = [name for name in ROWS if any(part in name for part in options.rows)]
    packages = ("hf_mxfp4", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao")
    installed = {
        d.name: d.version for d in map(importlib.metadata.distribution, filter(importlib.util.find_spec, packages))
    }
    print(
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d};", ", ".join(f"{k} {v}" for k, v in installed.items())
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if (made := finish(*start(prepare, work, verbose=True), 300)) != "done":
            raise RuntimeError(f"the models were not made: {made}")
        limit = (options.timeout + 5) * len(names) + 60
        columns = {
            name: finish(*start(column, SIDES[name], names, work, options, verbose=True), limit)
            for name in options.sides
        }
    print("\n| | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for name in names:
        print("|", name, "|", " | ".join(cells[name] for cells in columns.values()), "|")


if __name__ == "__main__":
    main()

"""Tensor, expert and FSDP plans, on two and four processes over gloo, against one process and against stock.

The file is also the program that these processes run: pytest makes the models and what one process computes,
starts a group of processes once for each number of them, and looks at what these have written down.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Llama4TextConfig, core_model_loading
from transformers.distributed import DistributedConfig

import hf_mxfp4

HAS_EP_SIZE = "ep_size" in {field.name for field in dataclasses.fields(DistributedConfig)}
NO_EP_SIZE = "DistributedConfig has no ep_size before Transformers 5.19"

# An inner width of 128 is whole blocks on up to four processes.
WIDTHS = {
    "mixtral": {"intermediate_size": 128, "num_key_value_heads": 4},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8},
    "deepseek_v3": {"moe_intermediate_size": 128},
    "gpt_oss": {"intermediate_size": 128},
    "nemotron_h": {"moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 64},
}
KINDS = ("dense", "packed", "stacked")
LAYOUTS = {
    2: {
        "tp": {"tp_size": 2},
        "tp+ep": {"tp_size": 2, "ep_size": 2},
        "fsdp": {"fsdp_size": 2},
        "fsdp+ep": {"fsdp_size": 2, "ep_size": 2},
    },
    4: {
        "tp": {"tp_size": 4},
        "tp+fsdp": {"tp_size": 2, "fsdp_size": 2},
        "fsdp+ep": {"fsdp_size": 4, "ep_size": 2},
        "tp+fsdp+ep": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
    },
}
ON_FOUR = {"tp": ("mixtral", "deepseek_v3"), "tp+fsdp": ("mixtral", "nemotron_h"), "fsdp+ep": ("gpt_oss", "qwen3_moe")}
ON_FOUR |= {"tp+fsdp+ep": tuple(WIDTHS)}
# What a process holds of the packed bytes, where that is not one part of as many as there are processes: gpt-oss has no
# tensor-parallel plan for experts.
SHARES = {("gpt_oss", "tp"): 1.0, ("gpt_oss", "tp+fsdp"): 0.5}
CASES = [(2, layout, family) for layout in LAYOUTS[2] for family in WIDTHS]
CASES += [(4, layout, family) for layout, families in ON_FOUR.items() for family in families]


def is_supported(sizes):
    """Whether this version of Transformers has such a layout."""
    return HAS_EP_SIZE or not ("ep_size" in sizes or len(sizes) > 1)


def distributed(**sizes):
    return DistributedConfig(**sizes)


def folder_of(root, family, kind):
    return root / (family if kind in ("stock", "dense") else f"{family}-{kind}")


def load(path, *, stock=False, **kwargs):
    if not stock:
        kwargs.setdefault("quantization_config", hf_mxfp4.MXFP4Config())
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).eval()


def prompt():
    return torch.randint(3, 250, (4, 13), generator=torch.Generator().manual_seed(5))


def outputs(model):
    with torch.no_grad():
        logits = model(prompt()).logits
    return logits, model.generate(prompt(), max_new_tokens=5, do_sample=False)


def packed_bytes(model):
    """Of the packed parameters, those that this process holds."""
    parts = [p for name, p in model.named_parameters() if name.endswith(("_blocks", "_scales"))]
    return sum((part.to_local() if hasattr(part, "to_local") else part).nbytes for part in parts)


# What one of several processes does.


class Reads:
    """Counts the bytes that a load reads for parameters of three dimensions, which are those of experts."""

    def __init__(self):
        self.bytes, self.stock = 0, core_model_loading.spawn_materialize

    def __call__(self, pool, tensor, *args, sharding_op=None, **kwargs):
        job = self.stock(None, tensor, *args, sharding_op=sharding_op, **kwargs)
        return job if sharding_op is None or sharding_op.param_ndim != 3 else lambda: self.count(job())

    def count(self, tensor):
        self.bytes += 0 if tensor is None else tensor.nbytes
        return tensor

    def __enter__(self):
        core_model_loading.spawn_materialize = self
        return self

    def __exit__(self, *_):
        core_model_loading.spawn_materialize = self.stock


def compare(root, family, kind, sizes, target):
    """How a model over several processes differs from one that is not, and what it read and holds."""
    expected = torch.load(root / f"{family}.pt")
    with Reads() as reads:
        model = load(folder_of(root, family, kind), stock=kind == "stock", distributed_config=distributed(**sizes))
    logits, tokens = outputs(model)
    truth = "stock" if kind == "stock" else "ours"
    if kind in ("dense", "packed"):
        model.save_pretrained(target)
    return {
        "difference": (logits - expected[truth][0]).abs().max().item(),
        "same tokens": torch.equal(tokens, expected[truth][1]),
        "held": packed_bytes(model) / expected["bytes"],
        "read": reads.bytes,
    }


def refusal(path, sizes, **kwargs):
    try:
        load(path, distributed_config=distributed(**sizes), **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def refusals(root):
    found = {
        "width": refusal(root / "narrow", {"tp_size": 2}),
        "width, packed": refusal(root / "narrow-packed", {"tp_size": 2}),
        "apart": refusal(root / "mixtral-mlx", {"tp_size": 2}),
        "transposed": refusal(root / "llama4", {"tp_size": 2}),
        "bias": "",
    }
    model = load(root / "mixtral-packed", distributed_config=distributed(tp_size=2))
    try:
        model.dequantize()
    except ValueError as error:
        found["dequantize"] = str(error)
    plan = {"model.layers.*.mlp.experts": "moe_tp_experts"}
    plan |= {f"model.layers.*.mlp.experts.down_proj_{part}": "rowwise" for part in ("blocks", "scales")}
    found["bias"] = refusal(root / "gpt_oss-packed", {"tp_size": 2, "tp_plan": plan})
    return found


def difference(path, sizes, **kwargs):
    """Between several processes and one, in the logits."""
    config = kwargs.pop("config", {})
    one = load(path, quantization_config=hf_mxfp4.MXFP4Config(**config), **kwargs)
    expected = one(prompt()).logits
    many = load(path, quantization_config=hf_mxfp4.MXFP4Config(**config), distributed_config=distributed(**sizes))
    return (many(prompt()).logits - expected).abs().max().item()


@torch.no_grad()
def others(root):
    """Further checkpoints: of an odd number of experts, transposed, dense in part."""
    part = {"modules_to_not_convert": ["layers.0.mlp.experts"]}
    found = {
        "odd": difference(root / "odd", {"fsdp_size": 2}),
        "odd, packed": difference(root / "odd-packed", {"fsdp_size": 2}),
        "transposed": difference(root / "llama4-packed", {"tp_size": 2}),
        "transposed, quantized": difference(root / "llama4", {"fsdp_size": 2}),
        "apart": difference(root / "mixtral-mlx", {"fsdp_size": 2}),
        "decoded": difference(root / "mixtral-packed", {"tp_size": 2}, config={"dequantize": True}),
        "in part": difference(root / "mixtral-packed", {"tp_size": 2}, config=part),
        "in part, quantized": difference(root / "mixtral", {"tp_size": 2}, config=part),
    }
    if HAS_EP_SIZE:
        found["decoded, by expert"] = difference(
            root / "gpt_oss-packed", {"tp_size": 2, "ep_size": 2}, config={"dequantize": True}
        )
    return found


class Adapted(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it."""

    def __init__(self, layer):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layer = layer
        self.a = nn.Parameter(0.1 * torch.randn(4, layer.in_features, generator=generator))
        self.b = nn.Parameter(0.1 * torch.randn(layer.out_features, 4, generator=generator))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def adapted(path):
    model = load(path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    return model


def trained(model):
    """Logits and the gradients of what is trained."""
    out = model(prompt(), labels=prompt())
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


def wrapped(path):
    """A model that FSDP2 wraps by hand, with adapters, against one that it does not."""
    from torch.distributed.fsdp import fully_shard

    expected, gradients = trained(adapted(path))
    model = adapted(path)
    held = packed_bytes(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    logits, found = trained(model)
    return {
        "forward": (logits - expected).abs().max().item(),
        "names": sorted(found) == sorted(gradients) and len(found) == 4,
        "gradient": max(((found[n] - g).abs().max() / g.abs().max()).item() for n, g in gradients.items()),
        "held": packed_bytes(model) / held,
    }


def gradients(root):
    """Of all floating point parameters under each layout, against one process: the largest relative difference."""
    worst = {}
    _, expected = trained(load(root / "mixtral-packed"))
    for name, sizes in LAYOUTS[2].items():
        if is_supported(sizes):
            _, found = trained(load(root / "mixtral-packed", distributed_config=distributed(**sizes)))
            assert found.keys() == expected.keys()
            worst[name] = max(((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items())
    return worst


def work(root):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    count, found = torch.distributed.get_world_size(), {}
    for number, layout, family in CASES:
        sizes = LAYOUTS[number][layout]
        if number != count or not is_supported(sizes):
            continue
        for kind in ("stock", *KINDS):
            if folder_of(root, family, kind).exists() and not (count == 4 and kind == "stacked"):
                target = root / "saved" / f"{count}-{layout}-{family}-{kind}"
                found[f"{layout} {family} {kind}"] = compare(root, family, kind, sizes, target)
    if count == 2:
        found |= {"refusals": refusals(root), "others": others(root), "gradients": gradients(root)}
        found["wrapped"] = wrapped(root / "mixtral-packed")
    (root / f"{count}-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    sys.exit()


# What pytest does.


def write(config, path):
    """A random bfloat16 model, saved as its owner would."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
            elif not bool(parameter.any()):
                parameter.normal_(std=0.05)  # biases
    model.save_pretrained(path)


def save_packed(path, target, save_format="auto"):
    model = load(path, quantization_config=hf_mxfp4.MXFP4Config(save_format=save_format))
    model.save_pretrained(target)
    return model


def llama4():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": 256, "intermediate_size": 64, "intermediate_size_mlp": 64}
    sizes |= {"num_local_experts": 4, "max_position_embeddings": 128, "no_rope_layers": [1, 1]}
    return Llama4TextConfig(**sizes, attn_temperature_tuning=False)


def start(count, root):
    """Runs this file in `count` processes; gives what each of them wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    ran = subprocess.run(
        [*command, __file__, str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads((root / f"{count}-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def root(tmp_path_factory, sources):
    """Checkpoints of all kinds, and what one process computes with them."""
    root = tmp_path_factory.mktemp("parallel")
    for family, widths in WIDTHS.items():
        config = AutoConfig.from_pretrained(sources[family])
        for name, value in widths.items():
            setattr(config, name, value)
        write(config, root / family)
        model = save_packed(root / family, root / f"{family}-packed")
        stock = outputs(load(root / family, stock=True))
        expected = {"ours": outputs(model), "stock": stock, "bytes": packed_bytes(model), "state": model.state_dict()}
        torch.save(expected, root / f"{family}.pt")
    save_packed(root / "mixtral", root / "mixtral-stacked", "hf_mxfp4")
    save_packed(root / "mixtral", root / "mixtral-mlx", "mlx")
    write(llama4(), root / "llama4")
    shutil.copytree(sources["mixtral"], root / "narrow")  # 96 wide
    shutil.copytree(sources["qwen3_moe"], root / "odd")  # five experts
    for name in ("narrow", "odd", "llama4"):
        save_packed(root / name, root / f"{name}-packed")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def two(root):
    return start(2, root)


@pytest.fixture(scope="module")
def four(root):
    return start(4, root)


@pytest.fixture
def found(request):
    """What each process of a number found."""
    return lambda count: request.getfixturevalue({2: "two", 4: "four"}[count])


def skip_unless_supported(sizes):
    if not is_supported(sizes):
        pytest.skip(NO_EP_SIZE if "ep_size" in sizes else "plans do not mix before Transformers 5.19")


@pytest.mark.parametrize(("count", "layout", "family"), CASES)
def test_as_one_process(count, layout, family, found):
    skip_unless_supported(LAYOUTS[count][layout])
    for process in found(count):
        stock = process[f"{layout} {family} stock"]
        kinds = [kind for kind in KINDS if f"{layout} {family} {kind}" in process]
        assert kinds[:2] == ["dense", "packed"]
        for kind in kinds:
            ours = process[f"{layout} {family} {kind}"]
            assert ours["same tokens"], kind
            assert ours["difference"] <= 2 * max(stock["difference"], 1e-6), kind


@pytest.mark.parametrize(("count", "layout", "family"), CASES)
def test_each_process_reads_and_holds_its_part(count, layout, family, found, root):
    skip_unless_supported(LAYOUTS[count][layout])
    share = SHARES.get((family, layout), 1 / count)
    if family == "nemotron_h" and not HAS_EP_SIZE and layout == "tp":
        share = 1.0  # no tensor-parallel plan for its experts then
    of_file = sum(
        tensor.nbytes
        for name, tensor in load_file(root / f"{family}-packed" / "model.safetensors").items()
        if ".experts." in name and tensor.dtype == torch.uint8
    )
    for process in found(count):
        for kind in ("dense", "packed"):
            ours = process[f"{layout} {family} {kind}"]
            assert ours["held"] == pytest.approx(share)
            whole = of_file if kind == "packed" else of_file * 64 / 17  # bfloat16 has 16 bits a weight, not 4.25
            assert ours["read"] == pytest.approx(share * whole if share < 1 else 0)  # 0 where nothing is split


@pytest.mark.parametrize(("count", "layout", "family"), CASES)
def test_saved_by_all_and_loaded_by_one(count, layout, family, found, root):
    skip_unless_supported(LAYOUTS[count][layout])
    found(count)
    expected = torch.load(root / f"{family}.pt")["state"]
    for kind in ("dense", "packed"):
        state = load(root / "saved" / f"{count}-{layout}-{family}-{kind}").state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), kind


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("width", "experts.down_proj has an input width of 96, which 2 processes cannot share in multiples of 32"),
        ("width", "tp_size 1 or 3 fits, and so does expert parallelism"),
        ("width, packed", "experts.down_proj has an input width of 96, which 2 processes cannot share"),
        ("apart", "gate_up_proj: tensor parallelism cannot split gates and ups that the file stacks apart"),
        (
            "transposed",
            "the transposed experts of Llama4TextExperts cannot be quantized on load under tensor parallelism",
        ),
        ("bias", "tensor parallelism would add the biases of GptOssExperts more than once"),
        ("dequantize", "gate_up_proj is split over processes and cannot be dequantized"),
    ],
)
def test_what_cannot_be_split_is_refused_by_every_process(case, message, two):
    for process in two:
        assert message in process["refusals"][case]


def test_other_checkpoints(two):
    for process in two:
        assert max(process["others"].values()) < 1e-5, process["others"]


def test_gradients(two):
    for process in two:
        assert max(process["gradients"].values()) < 1e-4, process["gradients"]


def test_fsdp_wraps_a_packed_model_with_adapters(two):
    for process in two:
        seen = process["wrapped"]
        assert seen["names"]
        assert seen["forward"] < 1e-5
        assert seen["gradient"] < 1e-4
        assert seen["held"] == pytest.approx(0.5)

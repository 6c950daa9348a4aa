"""Every dialect loads to the same bytes and computes the same, and is written as it was read."""

import contextlib
import json
from pathlib import Path

import layouts
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3VLMoeTextConfig, Qwen3VLMoeTextModel

import hf_mxfp4

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "nemotron_h")
TOKENS = torch.arange(3, 19)[None]
PAIRS = [
    (family, dialect)
    for family in FAMILIES
    for dialect in layouts.DIALECTS
    if dialect != "gpt-oss" or family == "gpt_oss"
    if dialect != "vllm" or family != "nemotron_h"  # it has no name for experts without a gate
]


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory, sources):
    """Folder of a family in a dialect."""
    root, made = tmp_path_factory.mktemp("dialects"), {}

    def make(family, dialect):
        if (family, dialect) not in made:
            made[family, dialect] = layouts.lay_out(dialect, sources[family], root / f"{family}-{dialect}")
        return made[family, dialect]

    return make


@pytest.fixture(scope="session")
def quantized(sources):
    """The dense folder of a family, quantized as it loads: bytes by name, and logits."""
    made = {}

    def load(family):
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(
                sources[family], dtype=torch.float32, quantization_config=hf_mxfp4.MXFP4Config()
            )
            made[family] = packed_bytes(model), logits(model)
        return made[family]

    return load


@pytest.fixture
def reads(reads_e8m0):
    """Ends a test where this version of Transformers refuses to read the scales of a dialect."""

    @contextlib.contextmanager
    def reads(dialect):
        if dialect != "deepseek-v4" or isinstance(reads_e8m0, contextlib.nullcontext):
            yield
            return
        with reads_e8m0:
            yield
        pytest.skip("refused, as it should be")

    return reads


def packed_bytes(model):
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if isinstance(module, hf_mxfp4.MXFP4Experts)
        for key, value in module.state_dict().items()
    }


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same(model, expected):
    stored, outputs = expected
    found = packed_bytes(model)
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(found[name], value), name
    assert torch.equal(logits(model), outputs)


@pytest.mark.parametrize(("family", "dialect"), PAIRS)
def test_dialect_loads_to_the_same_bytes_and_logits(family, dialect, laid_out, quantized, load, reads):
    with reads(dialect):
        model = load(laid_out(family, dialect))
    hf_mxfp4.assert_packed(model)
    assert {row.source for row in hf_mxfp4.packed_report(model).rows} == {dialect}
    assert_same(model, quantized(family))


@pytest.mark.parametrize(("family", "dialect"), PAIRS)
def test_enabled_it_loads_so_without_a_config(family, dialect, laid_out, quantized, reads):
    with hf_mxfp4.enable(), reads(dialect):
        model = AutoModelForCausalLM.from_pretrained(laid_out(family, dialect), dtype=torch.float32)
    hf_mxfp4.assert_packed(model)
    assert_same(model, quantized(family))


@pytest.mark.parametrize(("family", "dialect"), PAIRS)
def test_saved_in_its_own_dialect_it_is_byte_identical(family, dialect, laid_out, quantized, load, reads, tmp_path):
    folder = laid_out(family, dialect)
    with reads(dialect):
        model = load(folder, dtype="auto", config=hf_mxfp4.MXFP4Config(save_format=dialect))
    model.save_pretrained(tmp_path)
    before, after = load_file(f"{folder}/model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if ".mixer.gate." in name:  # some versions of Transformers keep it in float32
            value = value.to(after[name].dtype)
        assert value.dtype == after[name].dtype, name
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    hf_mxfp4.assert_packed(again)
    assert_same(again, quantized(family))


def original_names(tensors, config):
    """The tensors of a dense gpt-oss folder under OpenAI's own names, without its experts' weights."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("model.layers.", "block.").replace("model.norm.weight", "norm.scale")
        name = name.replace("model.embed_tokens", "embedding").replace("lm_head", "unembedding")
        name = name.replace("input_layernorm.weight", "attn.norm.scale").replace("mlp.router", "mlp.gate")
        name = name.replace("post_attention_layernorm.weight", "mlp.norm.scale").replace(
            "self_attn.sinks", "attn.sinks"
        )
        renamed[name.replace("self_attn.o_proj", "attn.out")] = tensor
    for n in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            heads = [renamed.pop(f"block.{n}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            renamed[f"block.{n}.attn.qkv.{kind}"] = torch.cat(heads)
    return renamed


@pytest.fixture
def original(tmp_path, sources):
    """A folder as openai/gpt-oss has it in `original/`."""
    folder, config = tmp_path / "original", json.loads(Path(sources["gpt_oss"], "config.json").read_text())
    packed, _, biases, rest, interleaved = layouts.packed_matrices(sources["gpt_oss"])
    tensors = original_names(rest, config)
    for n, (module, parts) in enumerate(sorted(packed.items())):
        halves = zip(parts["gate"], parts["up"], strict=True)
        for mlp, (codes, scales), bias in (
            (
                "mlp1",
                tuple(layouts.join(*half, interleaved) for half in halves),
                layouts.join(biases[module]["gate"], biases[module]["up"], interleaved),
            ),
            ("mlp2", parts["down"], biases[module]["down"]),
        ):
            base = f"block.{n}.mlp.{mlp}"
            tensors[f"{base}_weight.blocks"] = codes.reshape(*scales.shape, 16)
            tensors[f"{base}_weight.scales"], tensors[f"{base}_bias"] = scales, bias
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    own = {"num_experts": config["num_local_experts"], "experts_per_token": 2, "hidden_size": config["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def test_gpt_oss_under_openais_own_names(original, sources, quantized):
    # Its config.json has no model_type, so that a config of Transformers is passed.
    model = AutoModelForCausalLM.from_pretrained(
        original,
        config=AutoConfig.from_pretrained(sources["gpt_oss"]),
        dtype=torch.float32,
        quantization_config=hf_mxfp4.MXFP4Config(),
    )
    hf_mxfp4.assert_packed(model)
    assert {row.source for row in hf_mxfp4.packed_report(model).rows} == {"gpt-oss-original"}
    assert_same(model, quantized("gpt_oss"))
    assert {name for name, _ in model.named_parameters() if "proj" in name and "expert" not in name}


def test_gpt_oss_under_openais_own_names_is_saved_as_stock_has_it(original, sources, quantized, tmp_path):
    config = AutoConfig.from_pretrained(sources["gpt_oss"])
    model = AutoModelForCausalLM.from_pretrained(
        original, config=config, dtype="auto", quantization_config=hf_mxfp4.MXFP4Config()
    )
    model.save_pretrained(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks" in names
    assert not any("qkv" in name or name.startswith("block.") for name in names)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert_same(again, quantized("gpt_oss"))


VLLM_SHARDS = {"w13": ("gate_proj", "up_proj", "w1", "w3"), "w2": ("down_proj", "w2")}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_per_expert_files_fill_what_vllm_registers(family, sources, load, tmp_path):
    """vLLM's compressed-tensors MoE method has w13_weight_packed [E, 2I, H/2], w2_weight_packed [E, H, I/2] and scales
    /32, uint8, and fills them from one tensor an expert under the model's own names."""
    load(sources[family], config=hf_mxfp4.MXFP4Config(save_format="compressed-tensors")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    count = config.get("num_experts") or config["num_local_experts"]
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    rows = {"w13": (inner, hidden), "w2": (hidden, inner)}
    filled = dict.fromkeys(((shard, ending) for shard in rows for ending in ("weight_packed", "weight_scale")), 0)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." not in name:
            continue
        expert, matrix, ending = name.rpartition(".experts.")[2].split(".")
        shard = next(shard for shard, matrices in VLLM_SHARDS.items() if matrix in matrices)
        n, k = rows[shard]
        assert int(expert) < count
        assert (tensor.dtype, *tensor.shape) == (torch.uint8, n, k // (2 if ending == "weight_packed" else 32)), name
        filled[shard, ending] += n
    layers = config["num_hidden_layers"]
    for (shard, _), found in filled.items():
        assert found == layers * count * rows[shard][0] * (2 if shard == "w13" else 1)
    groups = config["quantization_config"]["config_groups"].values()
    assert [group["format"] for group in groups] == ["mxfp4-pack-quantized"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_fused_files_have_what_vllm_registers(family, sources, load, tmp_path):
    """vLLM's mxfp4 MoE method has w13_weight uint8 [E, 2I, H/2], w13_weight_scale [E, 2I, H/32], w13_bias [E, 2I] and
    the same for w2."""
    load(sources[family], config=hf_mxfp4.MXFP4Config(save_format="vllm")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    count = config.get("num_experts") or config["num_local_experts"]
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    expected = {
        "w13_weight": (count, 2 * inner, hidden // 2),
        "w13_weight_scale": (count, 2 * inner, hidden // 32),
        "w2_weight": (count, hidden, inner // 2),
        "w2_weight_scale": (count, hidden, inner // 32),
    }
    if family == "gpt_oss":
        expected |= {"w13_bias": (count, 2 * inner), "w2_bias": (count, hidden)}
    tensors = load_file(tmp_path / "model.safetensors")
    for n in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{n}.mlp.experts."
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        assert {name: tuple(t.shape) for name, t in found.items()} == expected
        assert all(t.dtype == torch.uint8 for name, t in found.items() if "bias" not in name)
    assert config["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize("dialect", ["compressed-tensors", "quark", "deepseek-v4", "ling", "mlx", "hf_mxfp4"])
def test_stacks_that_a_models_own_files_have_turned_are_saved_and_read(dialect, write, load, tmp_path, reads):
    """Qwen3-VL-MoE's own conversion turns stacks, and has none for single experts."""
    config = Qwen3VLMoeTextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
        moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2, intermediate_size=96,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    torch.manual_seed(0)
    dense = Qwen3VLMoeTextModel(config).to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    options = {"dtype": torch.float32, "quantization_config": hf_mxfp4.MXFP4Config(save_format=dialect)}
    model = Qwen3VLMoeTextModel.from_pretrained(tmp_path / "dense", **options)
    hf_mxfp4.assert_packed(model)
    model.save_pretrained(tmp_path / "saved")
    with reads(dialect):
        again = Qwen3VLMoeTextModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    hf_mxfp4.assert_packed(again)
    assert packed_bytes(again).keys() == packed_bytes(model).keys()
    assert all(torch.equal(value, packed_bytes(again)[name]) for name, value in packed_bytes(model).items())


def test_dense_models_stay_stocks_after_enable(tmp_path):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tensors = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scales = hf_mxfp4.quantize(tensors.pop(name))
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.weight_packed": codes, f"{base}.weight_scale": scales}
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": weights}
    stored = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
    }
    stored |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": stored}))
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    with hf_mxfp4.enable():
        got = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert torch.equal(got, expected)

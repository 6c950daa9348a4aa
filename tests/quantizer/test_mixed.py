"""Checkpoints in more than one format: FP8, NVFP4 or packed layers beside MXFP4 experts, and NVFP4 experts.

Everything is laid out by hand and decoded with numpy and ml_dtypes. N rows, K columns.
"""

import json
from pathlib import Path

import layouts
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.quantizers.base import HfQuantizer

import hf_mxfp4
from hf_mxfp4.convert import convert
from hf_mxfp4.formats import fp8

TOKENS = torch.arange(3, 19)[None]
WAYS = ("config", "enabled")
READS_FP8 = hasattr(HfQuantizer, "get_new_dtype")
reads_fp8 = pytest.mark.skipif(not READS_FP8, reason="Transformers before 5.21 casts it, and such files are refused")


def load(folder, way="config", dtype=torch.float32, **options):
    """A folder with an MXFP4Config, or after `enable` without one."""
    if way == "config":
        config = hf_mxfp4.MXFP4Config(**options)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
    with hf_mxfp4.enable():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def put(folder, tensors, config):
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def same_experts(model, reference):
    """Both hold the same expert bytes, of which there are some."""
    ours, theirs = (
        {n: t for n, t in m.state_dict().items() if n.endswith(("_blocks", "_scales"))} for m in (model, reference)
    )
    assert ours
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


# Block FP8: a float32 or E8M0 scale for each 128 x 128 block, those at the edges cut.


def block_fp8(weight, dtype, seed=0):
    """Random E4M3 bytes in the shape of a weight, random scales, and the float32 weights that they mean."""
    generator = np.random.default_rng(seed)
    n, k = weight.shape
    codes = generator.integers(0, 127, (n, k), dtype=np.uint8) | generator.integers(0, 2, (n, k), dtype=np.uint8) << 7
    exponents = generator.integers(118, 122, (-(-n // 128), -(-k // 128)), dtype=np.uint8)
    powers = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if dtype is torch.float32:
        powers = (powers * generator.uniform(0.5, 1, powers.shape)).astype(np.float32)
        scales = torch.from_numpy(powers)
    else:
        scales = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    spread = np.repeat(np.repeat(powers, 128, 0), 128, 1)[:n, :k]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scales, torch.from_numpy(values)


@pytest.fixture
def write_dense(write, tmp_path):
    """A dense folder of that hidden size, whose query projections are as high."""

    def make(family, width):
        heads = {"num_attention_heads": width // 32, "num_key_value_heads": 2, "head_dim": 32}
        return write(family, tmp_path / f"dense-{width}", hidden_size=width, **heads)

    return make


@reads_fp8
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dialect", "ending", "scale_dtype"),
    [
        ("deepseek-v4", ".scale", torch.float8_e8m0fnu),
        ("ling", ".weight_scale_inv", torch.float32),
        ("mimo", ".weight_scale_inv", torch.float32),
        ("quark", ".weight_scale_inv", torch.float32),
        ("quark", ".weight_scale", torch.float32),
    ],
)
def test_block_fp8_beside_mxfp4_experts(dialect, ending, scale_dtype, way, write_dense, tmp_path):
    # Quark's config says no size of blocks, so that they must be whole.
    source = write_dense("qwen3_moe", 256 if dialect == "quark" else 192)
    expected = {}

    def change(tensors):
        for i, name in enumerate([n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]):
            weight, scales, expected[name] = block_fp8(tensors[name], scale_dtype, seed=i)
            tensors[name], tensors[name.removesuffix(".weight") + ending] = weight, scales

    folder = layouts.lay_out(dialect, source, tmp_path / "mixed", change)
    model = load(folder, way)
    hf_mxfp4.assert_packed(model)
    same_experts(model, load(layouts.lay_out(dialect, source, tmp_path / "experts alone")))
    assert len(expected) == 8
    for name, values in expected.items():
        assert torch.equal(model.get_parameter(name), values), name
    assert model(TOKENS).logits.isfinite().all()
    # In bfloat16, each is rounded once.
    for name, values in expected.items():
        assert torch.equal(load(folder, way, torch.bfloat16).get_parameter(name), values.bfloat16()), name


@reads_fp8
def test_fp8_beside_the_experts_is_saved_dense_and_loads_again(write_dense, tmp_path):
    def change(tensors):
        for name in [n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"], _ = block_fp8(tensors[name], torch.float32)

    model = load(layouts.lay_out("ling", write_dense("qwen3_moe", 192), tmp_path / "mixed", change), dtype="auto")
    model.save_pretrained(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors")
    assert not [name for name, tensor in names.items() if tensor.dtype is torch.float8_e4m3fn or "scale_inv" in name]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    hf_mxfp4.assert_packed(again)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@reads_fp8
@pytest.mark.parametrize("lost", ["scales missing", "scales of another grid"])
def test_fp8_beside_the_experts_with_a_fault_is_named(lost, write_dense, tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"

    def change(tensors):
        tensors[name] = block_fp8(tensors[name], torch.float32)[0]
        if lost == "scales of another grid":
            tensors[f"{name}_scale_inv"] = torch.ones(7, 5)

    folder = layouts.lay_out("ling", write_dense("qwen3_moe", 192), tmp_path / "mixed", change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        load(folder)


@pytest.mark.parametrize("rows", [192, 448, 200])
def test_fp8_blocks_of_128_are_cut_at_the_edge_where_no_config_says_so(rows):
    weight, scales, expected = block_fp8(torch.empty(rows, 128), torch.float32)
    assert torch.equal(fp8.decode(weight, scales), expected)


@reads_fp8
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["mxfp8", "a scale for each row", "one scale"])
def test_fp8_of_compressed_tensors_beside_mxfp4_experts(kind, way, sources, tmp_path):
    """A file of two groups: MXFP4 for experts, 8 bits for attention."""
    expected = {}

    def change(tensors):
        for i, name in enumerate([n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]):
            generator = np.random.default_rng(i)
            n, k = tensors[name].shape
            codes = generator.integers(0, 127, (n, k), dtype=np.uint8)
            if kind == "mxfp8":
                stored = generator.integers(118, 122, (n, k // 32), dtype=np.uint8)
                spread = np.repeat(stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, 1)
            else:
                stored = spread = generator.uniform(0.01, 0.02, (n if "row" in kind else 1, 1)).astype(np.float32)
            tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.from_numpy(stored if "one" not in kind else stored[0])
            expected[name] = torch.from_numpy(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread)

    folder = layouts.lay_out("compressed-tensors", sources["qwen3_moe"], tmp_path / "mixed", change)
    config = config_of(folder)
    quant = config["quantization_config"]
    quant["config_groups"]["group_0"]["format"], quant["format"] = quant["format"], "mixed-precision"
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    group = {"format": "mxfp8-quantized", "targets": ["re:.*self_attn.*"], "weights": weights}
    quant["config_groups"]["group_1"] = group
    (Path(folder) / "config.json").write_text(json.dumps(config))
    model = load(folder, way)
    hf_mxfp4.assert_packed(model)
    assert len(expected) == 8
    for name, values in expected.items():
        assert torch.equal(model.get_parameter(name), values), name


def test_int4_beside_mxfp4_experts_is_refused(sources, tmp_path):
    """As AWQ and GPTQ store it: eight codes in an int32, scales and zero points."""

    def change(tensors):
        base = "model.layers.1.self_attn.q_proj"
        del tensors[f"{base}.weight"]
        tensors[f"{base}.qweight"] = torch.zeros(64, 8, dtype=torch.int32)
        tensors[f"{base}.qzeros"] = torch.zeros(2, 8, dtype=torch.int32)
        tensors[f"{base}.scales"] = torch.ones(2, 64, dtype=torch.float16)

    folder = layouts.lay_out("quark", sources["qwen3_moe"], tmp_path / "mixed", change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"layers\.1\.self_attn\.q_proj"):
        load(folder)


# Layers beside the experts in MXFP4.


@pytest.mark.parametrize("way", WAYS)
def test_compressed_tensors_with_packed_dense_layers(way, sources, tmp_path, decoded):
    """As llm-compressor writes a whole model: attention, the dense MLP, shared experts and the head are packed."""
    expected = {}

    def change(tensors):
        for name in [
            n for n in tensors if n.endswith("_proj.weight") and tensors[n].ndim == 2 and ".experts." not in n
        ]:
            if tensors[name].shape[1] % 32:
                continue
            base = name.removesuffix(".weight")
            codes, scales = hf_mxfp4.quantize(tensors.pop(name).contiguous(), "floor")
            tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"] = codes, scales
            expected[name] = decoded(codes, scales)

    folder = layouts.lay_out("compressed-tensors", sources["deepseek_v3"], tmp_path / "mixed", change)
    model = load(folder, way)
    hf_mxfp4.assert_packed(model)
    same_experts(model, load(layouts.lay_out("compressed-tensors", sources["deepseek_v3"], tmp_path / "alone")))
    assert {"q_a_proj", "o_proj", "gate_proj", "down_proj"} <= {name.split(".")[-2] for name in expected}
    assert any("shared_experts" in name for name in expected)
    assert any("layers.0.mlp.up_proj" in name for name in expected)
    for name, values in expected.items():
        assert torch.equal(model.get_parameter(name), values), name
    assert model(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_mlx_with_attention_embeddings_and_head_packed(way, sources, tmp_path, decoded):
    expected = {}

    def change(tensors):
        for name in [n for n in tensors if n.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))]:
            if "switch_mlp" in name:
                continue
            codes, scales = hf_mxfp4.quantize(tensors[name].contiguous(), "floor")
            tensors[name] = torch.from_numpy(codes.numpy().view("<u4"))
            tensors[name.removesuffix("weight") + "scales"] = scales
            expected[name] = decoded(codes, scales)

    folder = layouts.lay_out("mlx", sources["qwen3_moe"], tmp_path / "mixed", change)
    config = config_of(folder)
    config["quantization"] |= {f"model.layers.{layer}.mlp.gate": False for layer in (0, 1)}
    config["quantization_config"] = config["quantization"]  # MLX writes it twice
    (Path(folder) / "config.json").write_text(json.dumps(config))
    model = load(folder, way)
    hf_mxfp4.assert_packed(model)
    same_experts(model, load(layouts.lay_out("mlx", sources["qwen3_moe"], tmp_path / "experts alone")))
    assert len(expected) == 10
    for name, values in expected.items():
        assert torch.equal(model.get_parameter(name), values), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_with_routers_in_its_affine_format(bits, way, sources, tmp_path):
    """As MLX quantizes routers beside MXFP4 experts: value * scale + bias, the first value in the lowest bits."""
    expected, rng = {}, np.random.default_rng(0)

    def change(tensors):
        for name in [n for n in tensors if n.endswith("mlp.gate.weight")]:
            rows, columns = tensors[name].shape
            values = rng.integers(2**bits, size=(rows, columns), dtype=np.uint32)
            scales, biases = (rng.normal(size=(rows, columns // 32)).astype(np.float32) for _ in range(2))
            words = np.zeros((rows, columns * bits // 32), np.uint32)
            for column in range(columns):
                words[:, column * bits // 32] |= values[:, column] << (column * bits % 32)
            base = name.removesuffix("weight")
            tensors |= {name: torch.from_numpy(words)}
            tensors |= {base + "scales": torch.from_numpy(scales), base + "biases": torch.from_numpy(biases)}
            expected[name] = torch.from_numpy(values * np.repeat(scales, 32, 1) + np.repeat(biases, 32, 1))

    folder = layouts.lay_out("mlx", sources["qwen3_moe"], tmp_path / "mixed", change)
    config = config_of(folder)
    gates = {name.removesuffix(".weight"): {"group_size": 32, "bits": bits} for name in expected}
    config["quantization"] |= gates
    (Path(folder) / "config.json").write_text(json.dumps(config))
    model = load(folder, way)
    hf_mxfp4.assert_packed(model)
    assert len(expected) == 2
    for name, values in expected.items():
        assert torch.allclose(model.get_parameter(name), values.float(), rtol=1e-6, atol=1e-6), name
    convert(folder, tmp_path / "other", "quark", progress=False)
    same_experts(load(tmp_path / "other", way), model)
    for name, values in expected.items():
        assert torch.equal(load_file(tmp_path / "other" / "model.safetensors")[name], values.bfloat16()), name


@pytest.mark.parametrize("dialect", ["mlx", "compressed-tensors"])
def test_embeddings_that_are_packed_and_tied(dialect, write, tmp_path, decoded):
    source, expected = write("qwen3_moe", tmp_path / "tied", tie_word_embeddings=True), {}

    def change(tensors):
        tensors.pop("lm_head.weight", None)
        codes, scales = hf_mxfp4.quantize(tensors.pop("model.embed_tokens.weight"), "floor")
        expected["embed"] = decoded(codes, scales)
        stored = {"weight_packed": codes, "weight_scale": scales}
        stored = {"weight": codes.view(torch.uint32), "scales": scales} if dialect == "mlx" else stored
        tensors.update({f"model.embed_tokens.{ending}": tensor for ending, tensor in stored.items()})

    model = load(layouts.lay_out(dialect, source, tmp_path / "mixed", change))
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), expected["embed"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


# Experts that are not kept packed.


@pytest.mark.parametrize("dialect", [d for d in layouts.DIALECTS if READS_FP8 or d != "deepseek-v4"])
def test_experts_left_out_or_all_of_them_are_decoded(dialect, sources, tmp_path, decoded):
    folder = layouts.lay_out(dialect, sources["gpt_oss" if dialect == "gpt-oss" else "qwen3_moe"], tmp_path / "packed")
    packed = load(folder)
    partly, dense = load(folder, modules_to_not_convert=["model.layers.1"]), load(folder, dequantize=True)
    for layer, models in ((0, [dense]), (1, [dense, partly])):
        name = f"model.layers.{layer}.mlp.experts"
        experts = packed.get_submodule(name)
        for proj in ("gate_up_proj", "down_proj"):
            values = decoded(*experts.packed(proj))
            for model in models:
                weight = model.get_parameter(f"{name}.{proj}")
                assert torch.equal(weight.mT if experts.is_transposed else weight, values)
    assert [row.packed for row in hf_mxfp4.packed_report(partly).rows] == [True, False]


# NVFP4 experts: E2M1 codes, an E4M3 scale for 16 of them, a float32 scale for a tensor.

NVFP4 = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            }
        },
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16},
}


def nvfp4(weight, producer, seed):
    """The three tensors of a weight by their endings, and the float32 weights that they mean."""
    generator = np.random.default_rng(seed)
    n, k = weight.shape
    codes = generator.integers(0, 256, (n, k // 2), dtype=np.uint8)
    steps = generator.integers(0x28, 0x7F, (n, k // 16), dtype=np.uint8)
    global_scale = np.float32(generator.uniform(1000, 5000))
    apart = np.stack([codes & 15, codes >> 4], -1).reshape(n, k).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values = apart * np.repeat(steps.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16, -1)
    codes, steps = torch.from_numpy(codes), torch.from_numpy(steps).view(torch.float8_e4m3fn)
    if producer == "compressed-tensors":
        stored = {"weight_packed": codes, "weight_scale": steps, "weight_global_scale": torch.tensor([global_scale])}
        return stored | {"input_global_scale": torch.ones(1)}, torch.from_numpy(values / global_scale)
    stored = {"weight": codes, "weight_scale": steps, "weight_scale_2": torch.tensor(1 / global_scale)}
    return stored | {"input_scale": torch.tensor(1.0)}, torch.from_numpy(values * np.float32(1 / global_scale))


@pytest.fixture(params=NVFP4)
def producer(request):
    return request.param


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def nvfp4_folder(request, producer, sources, tmp_path):
    """A folder with experts, and attention, in NVFP4; and the weights that it means, as dense tensors by name."""
    source, tensors, means = Path(sources[request.param]), {}, {}
    for i, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if ".experts." not in name and "self_attn.q_proj" not in name:
            tensors[name] = tensor
            continue
        stored, means[name] = nvfp4(tensor, producer, seed=i)
        tensors |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in stored.items()}
    config = config_of(source) | {"quantization_config": NVFP4[producer]}
    return put(tmp_path / "nvfp4", tensors, config), means, source


@pytest.fixture
def dense_state(tmp_path):
    """What stock Transformers makes of dense float32 weights: the state dict by name."""

    def build(folder, means):
        tensors = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()} | means
        put(tmp_path / "means", tensors, config_of(folder))
        return AutoModelForCausalLM.from_pretrained(tmp_path / "means", dtype=torch.float32).state_dict()

    return build


@reads_fp8
def test_nvfp4_experts_are_refused_and_told_what_to_do(nvfp4_folder):
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"nvfp4.*MXFP4Config\(requantize=True\)"):
        load(nvfp4_folder[0])


@reads_fp8
def test_nvfp4_experts_dequantized_are_exactly_what_the_file_means(nvfp4_folder, dense_state):
    folder, means, source = nvfp4_folder
    model = load(folder, dequantize=True)
    want = dense_state(source, means)
    assert model.state_dict().keys() == want.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name


@reads_fp8
def test_nvfp4_experts_requantized_are_quantized_anew_and_the_loss_is_reported(nvfp4_folder, dense_state, decoded):
    folder, means, source = nvfp4_folder
    model = load(folder, requantize=True)
    hf_mxfp4.assert_packed(model)
    want = dense_state(source, means)
    report = hf_mxfp4.packed_report(model)
    assert len(report.rows) == 2
    for row in report.rows:
        added = norm = 0.0
        module = model.get_submodule(row.name)
        for proj in ("gate_up_proj", "down_proj"):
            exact, packed = want[f"{row.name}.{proj}"], module.packed(proj)
            for ours, theirs in zip(packed, hf_mxfp4.quantize(exact), strict=True):
                assert torch.equal(ours, theirs)
            added += float((decoded(*packed) - exact).double().square().sum())
            norm += float(exact.double().square().sum())
        assert row.loss == pytest.approx((added / norm) ** 0.5, rel=1e-6)
        assert 0.02 < row.loss < 0.3
        assert f"{row.loss:.1e}" in row.conversion
        assert row.source.startswith("nvfp4")
    for name, values in means.items():  # attention is decoded
        if "self_attn" in name:
            assert torch.equal(model.get_parameter(name), values), name


@reads_fp8
@pytest.mark.parametrize("part", ["codes", "scales", "tensor scale"])
def test_nvfp4_with_a_tensor_missing_is_named(part, producer, nvfp4_folder):
    folder, _, source = nvfp4_folder
    endings = {
        "compressed-tensors": {
            "codes": "weight_packed",
            "scales": "weight_scale",
            "tensor scale": "weight_global_scale",
        },
        "modelopt": {"codes": "weight", "scales": "weight_scale", "tensor scale": "weight_scale_2"},
    }
    down = "w2" if "mixtral" in str(source) else "down_proj"
    tensors = load_file(folder / "model.safetensors")
    lost = next(n for n in tensors if ".layers.1." in n and f".3.{down}.{endings[producer][part]}" in n)
    del tensors[lost]
    put(folder, tensors, config_of(folder))
    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"layers\.1\..*\.experts\.3\.{down}|experts\.down_proj"):
        load(folder, requantize=True)


# DeepSeek-V4 as its authors' files have it.


@pytest.fixture(scope="session")
def deepseek_v4(tmp_path_factory):
    """Folders of a tiny DeepSeek-V4: dense under Transformers' names, packed under its authors'; and what FP8 means."""
    root = tmp_path_factory.mktemp("v4")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"head_dim": 32, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "vocab_size": 128}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "sliding_window": 16}
    sizes |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 256}
    config = DeepseekV4Config(**sizes, pad_token_id=0, mlp_layer_types=["hash_moe", "moe"])
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.15)
    model.save_pretrained(root / "dense")
    tensors, matrices, fp8_means = {}, {}, {}
    for i, (name, tensor) in enumerate(load_file(root / "dense" / "model.safetensors").items()):
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        base = name.removesuffix(".weight")
        if ".experts." in name:
            matrices[base] = hf_mxfp4.quantize(tensor)
            tensors[name] = matrices[base].blocks.view(torch.int8)
            tensors[f"{base}.scale"] = matrices[base].scales.view(torch.float8_e8m0fnu)
        elif name.endswith((".wq_a.weight", ".wq_b.weight", ".wo_b.weight", "shared_experts.w1.weight")):
            tensors[name], tensors[f"{base}.scale"], fp8_means[name] = block_fp8(tensor, torch.float8_e8m0fnu, seed=i)
        else:
            tensors[name] = tensor
    # The layer that predicts one token more, which Transformers leaves out.
    tensors |= {
        n.replace("layers.1.", "mtp.0."): tensors[n] for n in list(tensors) if n.startswith("layers.1.ffn.experts.")
    }
    described = config_of(root / "dense")
    quant = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    quant["weight_block_size"] = [128, 128]
    put(root / "packed", tensors, described | {"quantization_config": quant, "expert_dtype": "fp4"})
    return root / "dense", root / "packed", matrices, fp8_means


def our_name(name):
    """A name of DeepSeek's FP8 layers as Transformers has it."""
    for old, new in (
        (".attn.", ".self_attn."),
        (".ffn.", ".mlp."),
        ("wq_a", "q_a_proj"),
        ("wq_b", "q_b_proj"),
        ("wo_b", "o_b_proj"),
        ("shared_experts.w1", "shared_experts.gate_proj"),
    ):
        name = name.replace(old, new)
    return f"model.{name}"


@reads_fp8
@pytest.mark.parametrize("where", ["top level", "quantization_config"])
@pytest.mark.parametrize("way", WAYS)
def test_deepseek_v4_loads_packed_under_its_own_names(way, where, deepseek_v4, decoded, tmp_path):
    dense, packed, matrices, fp8_means = deepseek_v4
    config = config_of(packed)
    if where == "quantization_config":  # as V4.1 has it
        config["quantization_config"]["expert_dtype"] = config.pop("expert_dtype")
    model = load(put(tmp_path, load_file(packed / "model.safetensors"), config), way)
    hf_mxfp4.assert_packed(model)
    report = hf_mxfp4.packed_report(model, check=True)
    assert {row.source for row in report.rows} == {"deepseek-v4"}
    assert all(row.bits_per_weight == 4.25 and row.error < 1e-6 for row in report.rows)
    stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, experts_implementation="eager")
    state = stock.state_dict()
    for layer in range(2):
        experts = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        for e in range(4):
            w1, w2, w3 = (matrices[f"layers.{layer}.ffn.experts.{e}.w{i}"] for i in (1, 2, 3))
            for i in (0, 1):
                assert torch.equal(experts.packed("gate_up_proj")[i][e], torch.cat([w1[i], w3[i]]))
                assert torch.equal(experts.packed("down_proj")[i][e], w2[i])
            prefix = f"model.layers.{layer}.mlp.experts"
            state[f"{prefix}.gate_up_proj"][e] = torch.cat([decoded(*w1), decoded(*w3)])
            state[f"{prefix}.down_proj"][e] = decoded(*w2)
    assert len(fp8_means) == 8
    for name, values in fp8_means.items():
        assert torch.equal(model.get_parameter(our_name(name)), values), name
        state[our_name(name)] = values
    stock.load_state_dict(state)
    expected, got = stock(TOKENS).logits, model(TOKENS).logits
    assert got.isfinite().all()
    assert (got - expected).norm() / expected.norm() < 2e-5


@reads_fp8
@pytest.mark.parametrize("save_format", ["auto", "deepseek-v4"])
def test_deepseek_v4_is_saved_and_loads_again(save_format, deepseek_v4, tmp_path):
    _, packed, matrices, _ = deepseek_v4
    model = load(packed, dtype="auto", save_format=save_format)
    model.save_pretrained(tmp_path / "saved")
    if save_format == "deepseek-v4":
        saved = {n.removeprefix("model."): t for n, t in load_file(tmp_path / "saved" / "model.safetensors").items()}
        for base, (codes, scales) in matrices.items():
            assert torch.equal(saved[f"{base}.weight"], codes.view(torch.int8)), base
            assert torch.equal(saved[f"{base}.scale"].view(torch.uint8), scales), base
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    hf_mxfp4.assert_packed(again)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@reads_fp8
def test_deepseek_v4_with_an_expert_missing_is_named(deepseek_v4, tmp_path):
    _, packed, _, _ = deepseek_v4
    tensors = {n: t for n, t in load_file(packed / "model.safetensors").items() if "layers.1.ffn.experts.2.w3" not in n}
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*missing of experts 2"):
        load(put(tmp_path, tensors, config_of(packed)))

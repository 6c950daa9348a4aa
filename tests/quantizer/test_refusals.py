"""What cannot be kept packed, or is not what it says, raises one error that names it, and no model comes back."""

import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

import hf_mxfp4

STACKED = "model.layers.1.mlp.experts.down_proj"
PER_EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(drop(f"{STACKED}_scales"), f"{STACKED}_scales is missing", id="scales missing"),
        pytest.param(drop(f"{STACKED}_blocks"), f"{STACKED}_blocks is missing", id="codes missing"),
        pytest.param(
            lambda t: {k: v for k, v in t.items() if not k.startswith(STACKED + "_") or k.endswith("bias")},
            f"missing from the checkpoint: {STACKED}_blocks, {STACKED}_scales",
            id="both missing",
        ),
        pytest.param(drop(f"{STACKED}_bias"), f"missing from the checkpoint: {STACKED}_bias", id="bias missing"),
        pytest.param(
            lambda t: [rename(f"{STACKED}_{p}", f"{STACKED}x_{p}")(t) for p in ("blocks", "scales")] and None,
            f"missing from the checkpoint: {STACKED}_blocks",
            id="both renamed",
        ),
        pytest.param(put(f"{STACKED}_scales", lambda t: t[:, :, :1]), "does not fit", id="scales of another width"),
        pytest.param(
            lambda t: (
                [put(f"{STACKED}_{p}", lambda x: x.repeat(8, *[1] * (x.ndim - 1)))(t) for p in ("blocks", "scales")]
                and None
            ),
            r"down_proj_blocks: packed bytes are \[32",
            id="more experts than the config says",
        ),
        pytest.param(put(f"{STACKED}_scales", lambda t: t.float()), "F32", id="scales as floats"),
    ],
)
def test_stacked_checkpoint_with_a_fault(sources, packed_folder, edit, change, message):
    folder = packed_folder(sources["gpt_oss"])
    edit(folder, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(drop(f"{PER_EXPERT}.weight_scale"), f"{PER_EXPERT}.weight_scale is missing", id="scale missing"),
        pytest.param(
            lambda t: {k: v for k, v in t.items() if not k.startswith(PER_EXPERT)},
            "model has 5 experts, the checkpoint has 4 of .*down_proj.*missing of experts 3",
            id="expert missing",
        ),
        pytest.param(
            lambda t: (
                t | {k.replace(".experts.4.", ".experts.5."): v.clone() for k, v in t.items() if ".experts.4." in k}
            ),
            "model has 5 experts, the checkpoint has 6",
            id="one expert too many",
        ),
        pytest.param(
            lambda t: (
                [put(f"{PER_EXPERT}.{p}", lambda x: x[:32])(t) for p in ("weight_packed", "weight_scale")] and None
            ),
            r"down_proj, expert 3: 32 rows in the checkpoint, 64 in the model",
            id="one expert of another shape",
        ),
    ],
)
def test_per_expert_checkpoint_with_a_fault(sources, packed_folder, edit, change, message):
    folder = packed_folder(sources["qwen3_moe"])
    edit(folder, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dense_weight_that_is_not_finite_is_named(sources, tmp_path, edit, load, value):
    for family, tensor, where in (
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            r"mlp\.experts\.3\.up_proj\.weight holds .* at index \[7, 5\]",
        ),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", r"down_proj, expert 2 holds .* at index \[7, 5\]"),
    ):
        folder = shutil.copytree(sources[family], tmp_path / family)

        def change(tensors, tensor=tensor):
            weight = tensors[tensor]
            weight[(7, 5) if weight.ndim == 2 else (2, 5, 7)] = value

        edit(folder, change)
        with pytest.raises(ValueError, match=where):
            load(folder)


def test_dense_expert_missing_is_named(sources, tmp_path, edit, load):
    folder = shutil.copytree(sources["mixtral"], tmp_path / "m")
    edit(folder, drop("model.layers.0.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"w3.*missing of experts 2"):
        load(folder)


def test_file_cut_short_is_named(sources, packed_folder):
    file = packed_folder(sources["qwen3_moe"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        AutoModelForCausalLM.from_pretrained(file.parent)


@pytest.mark.parametrize("what", ["hidden_size", "moe_intermediate_size"])
def test_width_that_is_no_multiple_of_32_names_tensor_and_width(write, tmp_path, load, what):
    path = write("qwen3_moe", tmp_path / "w", **{what: 40})
    proj = "gate_up_proj" if what == "hidden_size" else "down_proj"
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts\.{proj}: width 40 .* multiple of 32"):
        load(path)


def test_model_without_experts_is_refused(tmp_path, load):
    options = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**options)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts to keep in MXFP4"):
        load(tmp_path)


def test_checkpoint_of_another_method_is_refused_by_name(sources, tmp_path, edit_config, load):
    folder = shutil.copytree(sources["qwen3_moe"], tmp_path / "fp8")
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(hf_mxfp4.CheckpointError, match="quantized as fp8"):
        load(folder)


def test_config_that_says_mxfp4_over_dense_files_is_refused(sources, tmp_path, edit_config, load):
    folder = shutil.copytree(sources["gpt_oss"], tmp_path / "says")
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "mxfp4"}))
    with pytest.raises(hf_mxfp4.CheckpointError, match="no packed experts"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale_rul": "mse"}, TypeError, "no option 'scale_rul'; its options are scale_rule, ties"),
        ({"scale_rule": "ceil"}, ValueError, "scale_rule is 'ceil'; expected one of mse, even, floor, rceil"),
        ({"ties": "up"}, ValueError, "ties is 'up'"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; expected auto, reference"),
        ({"save_format": "gguf"}, ValueError, "save_format is 'gguf'; expected auto, gpt-oss"),
    ],
)
def test_config_with_an_option_that_does_not_exist(options, error, message):
    with pytest.raises(error, match=message):
        hf_mxfp4.MXFP4Config(**options)


def test_backend_that_is_not_here_is_refused_before_loading(sources, load):
    with pytest.raises(ValueError, match="backend is 'triton', but this version of hf_mxfp4 has no Triton kernels"):
        load(sources["qwen3_moe"], config=hf_mxfp4.MXFP4Config(backend="triton"))


def test_save_format_that_the_model_has_no_names_for_is_refused(sources, load):
    with pytest.raises(ValueError, match="save_format='compressed-tensors' stores a tensor an expert"):
        load(sources["gpt_oss"], config=hf_mxfp4.MXFP4Config(save_format="compressed-tensors"))


def test_use_kernels_would_replace_the_forward_and_is_refused(sources, monkeypatch):
    monkeypatch.setattr(
        GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False
    )  # as the package kernels does
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sources["gpt_oss"]))
    quantizer = hf_mxfp4.MXFP4HfQuantizer(hf_mxfp4.MXFP4Config(), pre_quantized=False)
    with pytest.raises(ValueError, match="use_kernels=True replaces the forward of GptOssMLP"):
        quantizer.preprocess_model(model, use_kernels=True)
    quantizer.preprocess_model(model, use_kernels=False)


def as_e8m0(tensors):
    for name in [n for n in tensors if n.endswith(("_scales", ".weight_scale"))]:
        tensors[name] = tensors[name].view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_scales_stored_as_e8m0_load_as_the_same_bytes(sources, packed_folder, edit, family, state):
    folder = packed_folder(sources[family])
    expected = state(AutoModelForCausalLM.from_pretrained(folder))
    edit(folder, as_e8m0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_scale_byte_255_loads_and_is_nan(sources, packed_folder, edit, tokens):
    folder = packed_folder(sources["gpt_oss"])

    def change(tensors):
        tensors[f"{STACKED}_scales"][0, 0, 0] = 255

    edit(folder, change)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert int(model.get_parameter(f"{STACKED}_scales")[0, 0, 0]) == 255
    assert torch.isnan(model.dequantize().get_parameter(STACKED)[0, :32, 0]).all()


def test_compressed_tensors_own_output_of_a_whole_model_loads(sources, tmp_path, edit_config, load, packed_of, decoded):
    """A checkpoint as llm-compressor makes it: attention is packed too, which is decoded; experts stay packed."""
    source = load_file(Path(sources["qwen3_moe"]) / "model.safetensors")
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    assert isinstance(scheme, QuantizationScheme)
    assert isinstance(scheme.weights, QuantizationArgs)
    tensors, scales = {}, {}
    for name, weight in source.items():
        base = name.removesuffix(".weight")
        if not (base.endswith("_proj") and weight.ndim == 2):
            tensors[name] = weight
            continue
        scales[base] = hf_mxfp4.quantize(weight, "even").scales
        scale = scales[base].view(torch.float8_e8m0fnu).float()
        packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        tensors |= {f"{base}.{key}": value for key, value in packed.items()}
    folder = shutil.copytree(sources["qwen3_moe"], tmp_path / "ct")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = scheme.model_dump() | {"format": "mxfp4-pack-quantized"}
    stored = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    stored |= {"ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed"}
    edit_config(folder, lambda config: config.update(quantization_config=stored))

    model = load(folder, dtype=torch.bfloat16)
    hf_mxfp4.assert_packed(model)
    experts = packed_of(model)["model.layers.1.mlp.experts"]
    raw = {key: tensors[f"{PER_EXPERT}.{key}"] for key in ("weight_packed", "weight_scale")}
    assert torch.equal(experts.packed("down_proj").blocks[3], raw["weight_packed"])
    assert torch.equal(experts.packed("down_proj").scales[3], raw["weight_scale"].view(torch.uint8))
    name = "model.layers.0.self_attn.q_proj"
    expected = decoded(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].view(torch.uint8))
    assert torch.equal(model.get_parameter(f"{name}.weight").float(), expected)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


def test_failed_load_leaves_the_callers_config_as_it_was(sources, load):
    config = AutoConfig.from_pretrained(sources["qwen3_moe"])
    asked = hf_mxfp4.MXFP4Config(backend="reference")
    before = dict(asked.__dict__)
    with pytest.raises(ValueError, match="modules_to_not_convert"):
        load(sources["qwen3_moe"], config=hf_mxfp4.MXFP4Config(modules_to_not_convert=["model"]))
    load(sources["qwen3_moe"], config=asked)
    assert asked.__dict__ == before
    assert not hasattr(config, "quantization_config")

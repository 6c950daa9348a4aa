"""Other software's MXFP4: its packers' bytes load as they are, and its decoders give the values that ours give.

Those of the test extra always run; those of the extra `oracles` where they are installed: .ci/run --oracles.
N rows, K columns; codes uint8 [N, K / 2], low nibble first; scales uint8 [N, K / 32].
"""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import hf_mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Every scale byte with every code, each code in a low nibble and in a high one.
CODES = torch.tensor([low | (low + 1) % 16 << 4 for low in range(16)], dtype=torch.uint8).repeat(256, 1)
SCALES = torch.arange(256, dtype=torch.uint8)[:, None]
SCHEME = preset_name_to_scheme("MXFP4A16", ["Linear"])


def low_first(halves):
    """uint8 [..., 16] of GGUF, weights j and j + 16 in byte j, as bytes of neighbours."""
    codes = np.concatenate([halves & 15, halves >> 4], -1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def halves(codes):
    """The reverse of `low_first`."""
    apart = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 32)
    return apart[..., :16] | apart[..., 16:] << 4


# Decoders: codes uint8 [N, K / 2] and scale bytes uint8 [N, K / 32] to values [N, K], float32 or bfloat16.


def by_gguf(codes, scales):
    blocks = np.concatenate([scales.numpy()[..., None], halves(codes.reshape(*scales.shape, 16).numpy())], -1)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.reshape(len(codes), -1), gguf.GGMLQuantizationType.MXFP4)
    return torch.from_numpy(values)


def by_ml_dtypes(codes, scales):
    apart = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(len(codes), -1)
    powers = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(all="ignore"):
        return torch.from_numpy(apart.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(powers, 32, -1))


def by_transformers_gpt_oss(codes, scales):
    blocks = codes.reshape(1, *scales.shape, 16)
    return convert_moe_packed_tensors(blocks, scales[None], dtype=torch.float32)[0].mT


def by_transformers_fp8(codes, scales):
    return Fp8Dequantize(None)._dequantize_one(codes.view(torch.int8), scales, torch.float32)


def by_transformers_fp8_e8m0(codes, scales):
    return by_transformers_fp8(codes, scales.view(torch.float8_e8m0fnu))


def by_compressed_tensors(codes, scales):
    return MXFP4PackedCompressor.decompress({"weight_packed": codes, "weight_scale": scales}, SCHEME)["weight"]


def by_auto_round(codes, scales):
    utils = pytest.importorskip("auto_round.experimental.qmodules.fp4_utils")
    mx = pytest.importorskip("auto_round.experimental.qmodules.mx")
    values = utils.unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], dtype=torch.float32)
    return values * mx.get_fp_scale(scales).repeat_interleave(32, -1)


def by_modelopt(codes, scales):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor").MXFP4QTensor
    shape = torch.Size((len(codes), 2 * codes.shape[1]))
    return qtensor(shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})


def by_modelopts_export(codes, scales):
    return pytest.importorskip("modelopt.torch.export.shard_cast_utils").dequantize_mxfp4_to_bf16(codes, scales, "cpu")


def by_quark(codes, scales):
    """Its codes' values; the power of two is multiplied here, in float64, and rounded once."""
    values = pytest.importorskip("quark.torch.utils.pack").Pack_fp4(None, "fp4").unpack(codes, False)
    return (values.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)).float()


def by_torchao(codes, scales):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    dtype = torch.float4_e2m1fn_x2
    return mx.to_dtype(codes, scales.view(torch.float8_e8m0fnu), dtype, 32, torch.float32)


def by_mlx(codes, scales):
    mx = pytest.importorskip("mlx.core")
    words = mx.array(codes.numpy().view("<u4"))
    values = mx.dequantize(words, mx.array(scales.numpy()), group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
    return torch.from_numpy(np.array(values))


DECODERS = {name.removeprefix("by_"): value for name, value in list(globals().items()) if name.startswith("by_")}
# Byte 255 stands for no number. Who does not read it as NaN goes on counting: 2^128, which float32 does not hold.
NAN_AT_255 = {"ml_dtypes", "transformers_fp8_e8m0", "torchao"}


@pytest.fixture(params=DECODERS)
def decoder(request):
    return request.param


def test_decoder_gives_our_values_for_every_code_and_scale_byte_but_255(decoder):
    got = DECODERS[decoder](CODES.clone(), SCALES.clone())
    ours = hf_mxfp4.dequantize(CODES, SCALES, got.dtype)
    assert got.shape == ours.shape == (256, 32)
    # Code 8 is -0.0 here and +0.0 to some, which is the same number; the largest scales overflow as they must.
    assert torch.equal(got[:255], ours[:255])
    assert got[:253].isfinite().all()
    assert got[0].abs().max() == 6 * 2.0**-127


def test_decoder_at_the_bytes_that_are_read_differently(decoder):
    """Ours at 0, 255 and code 8, as docs/formats.md has it; theirs at 255, so that a change is noticed."""
    ours = hf_mxfp4.dequantize(CODES, SCALES)
    assert ours[255].isnan().all()
    assert torch.equal(ours[0], ours[127] * 2.0**-127)
    assert torch.signbit(ours[:255, [15, 16]]).all()  # code 8, in a high nibble and in a low one
    assert ours[:255, [15, 16]].eq(0).all()
    theirs = DECODERS[decoder](CODES.clone(), SCALES.clone())
    assert theirs[255].isnan().all() == (decoder in NAN_AT_255)
    assert torch.signbit(theirs[127, 16]) == (decoder != "gguf")


# Packers: a weight float32 [N, K] to the tensors that their files hold.


def packed_by_compressed_tensors(weight):
    scales = hf_mxfp4.quantize(weight, "even").scales
    state = {"weight": weight, "weight_scale": scales.view(torch.float8_e8m0fnu).float()}
    packed = MXFP4PackedCompressor.compress(state, SCHEME)
    assert packed.keys() == {"weight_packed", "weight_scale"}
    return packed["weight_packed"], packed["weight_scale"]


def packed_by_gguf(weight):
    """Its blocks, their nibbles put side by side."""
    blocks = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4).reshape(len(weight), -1, 17)
    codes = low_first(blocks[..., 1:]).reshape(len(weight), -1)
    return torch.from_numpy(codes.copy()), torch.from_numpy(blocks[..., 0].copy())


def packed_by_auto_round(weight):
    """Its exporter's layer."""
    qlinear = pytest.importorskip("auto_round.export.export_to_autoround.qlinear_fp")
    linear = nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight.data = weight
    layer = qlinear.QuantLinear(4, 32, *reversed(weight.shape), False, data_type="mx_fp", act_bits=16)
    exponents = hf_mxfp4.quantize(weight, "even").scales.float() - 127
    layer.pack(linear, exponents.reshape(-1, 1), device="cpu")
    return layer.weight_packed, layer.weight_scale.reshape(len(weight), -1)


def packed_by_modelopt(weight):
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor").MXFP4QTensor
    packed, scales = qtensor.quantize(weight, 32)
    return packed._quantized_data, scales.reshape(len(weight), -1)


def packed_by_quark(weight):
    utils = pytest.importorskip("quark.torch.quantization.utils")
    pack = pytest.importorskip("quark.torch.utils.pack").Pack_fp4(None, "fp4")
    groups = weight.unflatten(-1, (-1, 32))
    powers = utils.even_round(groups.abs().amax(-1), "fp4")
    scaled = (groups / powers[..., None]).clamp(-6, 6).flatten(-2)
    levels = torch.tensor(E2M1)
    nearest = levels[(scaled.abs()[..., None] - levels).abs().argmin(-1)] * scaled.sign()
    return pack.pack(nearest, False), powers.to(torch.float8_e8m0fnu).view(torch.uint8)


def packed_by_torchao(weight):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scales, codes = mx.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def packed_by_mlx(weight):
    mx = pytest.importorskip("mlx.core")
    words, scales = mx.quantize(mx.array(weight.numpy()), group_size=32, bits=4, mode="mxfp4")
    return torch.from_numpy(np.array(words)), torch.from_numpy(np.array(scales))


MODELOPT = {"quant_method": "modelopt", "quant_algo": "mxfp4"}
PACKERS = {
    # name: how it packs, the dialect that its tensors are in, its config, and how their names end
    "compressed_tensors": (
        packed_by_compressed_tensors,
        "compressed-tensors",
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {**SCHEME.model_dump(mode="json"), "format": "mxfp4-pack-quantized"}},
        },
        (".weight_packed", ".weight_scale"),
    ),
    "gguf": (packed_by_gguf, "modelopt", MODELOPT, (".weight", ".weight_scale")),
    "auto_round": (
        packed_by_auto_round,
        "auto-round",
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"},
        (".weight_packed", ".weight_scale"),
    ),
    "modelopt": (packed_by_modelopt, "modelopt", MODELOPT, (".weight", ".weight_scale")),
    "quark": (
        packed_by_quark,
        "quark",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        (".weight", ".weight_scale"),
    ),
    "torchao": (
        packed_by_torchao,
        "deepseek-v4",
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        (".weight", ".scale"),
    ),
    "mlx": (packed_by_mlx, "mlx", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, (".weight", ".scales")),
}


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """Folder of a small model in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 5, "num_experts_per_tok": 2}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=256, **sizes)).bfloat16()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(std=0.15)
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("producer", PACKERS)
def test_what_a_producer_packed_loads_as_its_bytes_and_its_values(producer, dense, tmp_path):
    pack, dialect, config, endings = PACKERS[producer]
    tensors, matrices = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        base = name.removesuffix(".weight")
        matrices[base] = pack(tensor.float())
        tensors.update({base + end: part.contiguous() for end, part in zip(endings, matrices[base], strict=True)})
    if dialect == "mlx":
        tensors = stacked(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    described = json.loads(Path(dense, "config.json").read_text())
    described["quantization" if dialect == "mlx" else "quantization_config"] = config
    (tmp_path / "config.json").write_text(json.dumps(described))

    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=hf_mxfp4.MXFP4Config()
    )
    hf_mxfp4.assert_packed(model)
    assert {row.source for row in hf_mxfp4.packed_report(model).rows} == {dialect}
    tokens = torch.arange(3, 19)[None]
    logits = model(tokens).logits
    theirs = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, experts_implementation="eager")
    state = theirs.state_dict()
    decode = DECODERS[producer]
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.experts"
        experts = model.get_submodule(module)
        for e in range(5):
            parts = {p: matrices[f"{module}.{e}.{p}_proj"] for p in ("gate", "up", "down")}
            joined = [torch.cat([parts["gate"][i].view(torch.uint8), parts["up"][i].view(torch.uint8)]) for i in (0, 1)]
            down = [part.view(torch.uint8) for part in parts["down"]]
            for proj, expected in (("gate_up_proj", joined), ("down_proj", down)):
                codes, scales = (part[e] for part in experts.packed(proj))
                assert torch.equal(codes, expected[0]), f"{module}.{e}.{proj}"
                assert torch.equal(scales, expected[1]), f"{module}.{e}.{proj}"
                state[f"{module}.{proj}"][e] = decode(codes.clone(), scales.clone())
    theirs.load_state_dict(state)
    expected = theirs(tokens).logits
    assert (logits - expected).norm() / expected.norm() < 2e-5


def stacked(tensors):
    """One expert's tensors as MLX has them, all experts in one."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if ".experts.0." in name]:
        experts = [tensors[name.replace(".experts.0.", f".experts.{e}.")] for e in range(5)]
        joined = torch.stack([expert.view(torch.uint8) for expert in experts])
        kept[name.replace(".experts.0.", ".switch_mlp.")] = joined.view(experts[0].dtype)
    return kept

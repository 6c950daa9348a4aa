"""Models with code of their own whose experts are a list of small MLPs: Mixtral's old layout, and Kimi K3's.

The stand-ins have the names, shapes and traps of the real ones: K3 projects to a latent space and back around its
experts with layers that its compressed-tensors config targets and forgets to ignore, though they are stored dense.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import hf_mxfp4
from hf_mxfp4.linear import MXFP4Linear


class ListConfig(PretrainedConfig):
    model_type = "expert_list_stand_in"
    hidden_size = 64
    latent_size = 32
    intermediate_size = 96
    num_experts = 5
    num_experts_per_tok = 2
    vocab_size = 50
    kind = "mixtral"


class SiTUMLP(nn.Module):
    """Kimi K3's expert: 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25), gate w1, up w3, in float32."""

    def __init__(self, width, intermediate, kind):
        super().__init__()
        self.w1 = nn.Linear(width, intermediate, bias=kind == "biased")
        self.w2 = nn.Linear(intermediate, width, bias=False)
        self.w3 = nn.Linear(width, intermediate, bias=False)
        self.kind = kind

    def forward(self, x):
        gate, up = self.w1(x).float(), self.w3(x).float()
        if self.kind == "kimi":
            hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        else:
            hidden = nn.functional.silu(gate) * up
        return self.w2(hidden.to(self.w1.weight.dtype))


class ListMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k, self.latent = config.num_experts_per_tok, config.kind == "kimi"
        width = config.latent_size if self.latent else config.hidden_size
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [SiTUMLP(width, config.intermediate_size, config.kind) for _ in range(config.num_experts)]
        )
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, width, bias=False)
            self.routed_expert_up_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k)
        z = self.routed_expert_down_proj(x) if self.latent else x
        out = torch.zeros_like(z)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(z[token]) * weights[token, slot, None])
        return self.routed_expert_up_proj(out) if self.latent else out


class ListModel(PreTrainedModel):
    config_class = ListConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.block_sparse_moe = ListMoE(config)
            self.layers.append(layer)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.2)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = x + layer.block_sparse_moe(x)
        return x


EXPERT = "layers.1.block_sparse_moe.experts.3.w2"


@pytest.fixture(params=["mixtral", "kimi", "biased"])
def folder(request, tmp_path):
    torch.manual_seed(0)
    ListModel(ListConfig(kind=request.param)).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def load_list():
    def load(path, **options):
        options.setdefault("quantization_config", hf_mxfp4.MXFP4Config())
        return ListModel.from_pretrained(path, dtype=options.pop("dtype", torch.float32), **options)

    return load


def oracle(path, packed, decoded):
    model = ListModel.from_pretrained(path, dtype=torch.float32)
    for name, module in packed.named_modules():
        if isinstance(module, MXFP4Linear):
            model.get_submodule(name).weight.data = decoded(*module.packed("weight"))
    return model


def test_every_layer_of_every_expert_is_packed_and_nothing_else(folder, load_list, decoded):
    model = load_list(folder)
    packed = {name for name, module in model.named_modules() if isinstance(module, MXFP4Linear)}
    assert packed == {
        f"layers.{layer}.block_sparse_moe.experts.{e}.{w}"
        for layer in (0, 1)
        for e in range(5)
        for w in ("w1", "w2", "w3")
    }
    hf_mxfp4.assert_packed(model)
    report = hf_mxfp4.packed_report(model, check=True)
    assert [row.experts_class for row in report.rows] == ["SiTUMLP"] * 2
    assert all(row.error < 1e-6 and row.bits_per_weight == 4.25 for row in report.rows)
    weight = load_file(folder / "model.safetensors")[f"{EXPERT}.weight"]
    expected = hf_mxfp4.quantize(weight)
    for ours, theirs in zip(model.get_submodule(EXPERT).packed("weight"), expected, strict=True):
        assert torch.equal(ours, theirs)
    tokens = torch.arange(24).view(2, 12)
    want = oracle(folder, model, decoded)(tokens)
    assert (model(tokens) - want).norm() / want.norm() <= 2e-5


def test_save_and_reload_give_back_every_byte_under_compressed_tensors_names(folder, load_list, tmp_path):
    model = load_list(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "packed")
    names = load_file(tmp_path / "packed" / "model.safetensors")
    assert names[f"{EXPERT}.weight_packed"].shape == (model.get_submodule(EXPERT).out_features, 48)
    assert f"{EXPERT}.weight_scale" in names
    assert not [name for name in names if ".experts." in name and name.endswith(".weight")]
    again = ListModel.from_pretrained(tmp_path / "packed")
    hf_mxfp4.assert_packed(again)
    before = model.state_dict()
    assert before.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    assert {row.source for row in hf_mxfp4.packed_report(again).rows} == {"compressed-tensors"}


def test_dequantized_model_is_stock_and_saves_under_the_sources_names(folder, load_list, tmp_path, decoded):
    model = load_list(folder)
    want = oracle(folder, model, decoded).state_dict()
    load_list(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    at_load = load_list(tmp_path / "packed", quantization_config=hf_mxfp4.MXFP4Config(dequantize=True))
    for dense in (model.dequantize(), at_load):
        assert not any(isinstance(module, MXFP4Linear) for module in dense.modules())
        assert want.keys() == dense.state_dict().keys()
        assert all(torch.equal(tensor, want[name]) for name, tensor in dense.state_dict().items())
    at_load.save_pretrained(tmp_path / "dense again")
    assert load_file(tmp_path / "dense again" / "model.safetensors").keys() == want.keys()


def test_kimi_k3s_dense_layers_load_dense_though_its_config_targets_them(tmp_path, load_list):
    """The config of the published checkpoint: targets every Linear, and ignores all but these by name."""
    torch.manual_seed(0)
    ListModel(ListConfig(kind="kimi")).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    load_list(tmp_path / "dense", dtype=torch.bfloat16).save_pretrained(tmp_path / "k3")
    file = tmp_path / "k3" / "config.json"
    config = json.loads(file.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"] | {"targets": ["Linear"]}
    ignore = [
        r"re:.*self_attn.*",
        r"re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
    ]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
    file.write_text(json.dumps(config))
    model = load_list(tmp_path / "k3", dtype=torch.bfloat16)
    hf_mxfp4.assert_packed(model)
    source = load_file(tmp_path / "dense" / "model.safetensors")
    for name in ("routed_expert_down_proj", "routed_expert_up_proj", "gate"):
        full = f"layers.0.block_sparse_moe.{name}.weight"
        assert torch.equal(model.get_parameter(full), source[full])
    assert torch.isfinite(model(torch.arange(10)[None])).all()


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_one_half_missing_is_named(folder, load_list, tmp_path, part):
    load_list(folder).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items() if n != f"{EXPERT}.{part}"}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(hf_mxfp4.CheckpointError, match=EXPERT.replace(".", r"\.")):
        load_list(tmp_path / "packed", quantization_config=None)


def test_gradients_pass_through_and_layers_left_out_stay_dense(folder, load_list):
    model = load_list(folder, quantization_config=hf_mxfp4.MXFP4Config(modules_to_not_convert=["layers.0"]))
    assert type(model.layers[0].block_sparse_moe.experts[0].w1) is nn.Linear
    assert type(model.layers[1].block_sparse_moe.experts[0].w1) is MXFP4Linear
    with pytest.raises(hf_mxfp4.NotPackedError, match=r"layers\.0\.block_sparse_moe\.experts"):
        hf_mxfp4.assert_packed(model)
    model(torch.arange(10)[None]).square().sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


def test_scales_stored_as_e8m0_are_viewed_everywhere(folder, load_list, tmp_path, reads_e8m0):
    """In experts, and in packed layers beside them, which are decoded."""
    load_list(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    gate = "layers.0.block_sparse_moe.gate"
    packed = hf_mxfp4.quantize(tensors.pop(f"{gate}.weight"))
    tensors |= {f"{gate}.weight_packed": packed.blocks, f"{gate}.weight_scale": packed.scales}
    save_file(tensors, file, metadata={"format": "pt"})
    want = ListModel.from_pretrained(tmp_path / "packed").state_dict()
    assert torch.equal(want[f"{gate}.weight"].float(), packed.dequantize())
    scales = {n: t.view(torch.float8_e8m0fnu) for n, t in tensors.items() if n.endswith("weight_scale")}
    save_file(tensors | scales, file, metadata={"format": "pt"})
    with reads_e8m0:
        got = ListModel.from_pretrained(tmp_path / "packed").state_dict()
        assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())


def test_expert_that_the_model_has_no_room_for_is_named(folder, load_list, tmp_path):
    load_list(folder).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors |= {n.replace("experts.4.", "experts.5."): t.clone() for n, t in tensors.items() if "experts.4." in n}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"no room for: .*experts\.5\."):
        ListModel.from_pretrained(tmp_path / "packed")


def test_stacked_layouts_are_refused_for_single_layers(folder, load_list):
    with pytest.raises(ValueError, match="stacks experts, and this model's are single layers"):
        load_list(folder, quantization_config=hf_mxfp4.MXFP4Config(save_format="hf_mxfp4"))


def test_input_of_another_width_is_refused(folder, load_list):
    layer = load_list(folder).get_submodule(EXPERT)
    with pytest.raises(ValueError, match="does not fit a layer of width 96"):
        layer(torch.zeros(2, 95))

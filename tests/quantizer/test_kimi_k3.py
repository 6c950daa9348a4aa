"""A tiny stand-in for Kimi K3, with the names, layout and config of its files, as code of its own beside them.

Experts are a list of small MLPs w1, w2, w3 in a latent space, in compressed-tensors' MXFP4. The config targets every
Linear and ignores some by name; five kinds that it forgets are stored dense. E experts, T tokens, H hidden, L latent.
"""

import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import hf_mxfp4
from hf_mxfp4.linear import MXFP4Linear


class KimiLinearConfig(PretrainedConfig):
    model_type = "kimi_linear"
    hidden_size = 96
    num_hidden_layers = 3
    num_attention_heads = 4
    intermediate_size = 128
    first_k_dense_replace = 1
    routed_expert_hidden_size = 64
    moe_intermediate_size = 32
    num_experts = 6
    num_experts_per_token = 3
    num_shared_experts = 2
    vocab_size = 80
    situ_beta = 4.0
    situ_linear_beta = 25.0


class KimiK3Config(PretrainedConfig):
    model_type = "kimi_k3"

    def __init__(self, text_config=None, **kwargs):
        text_config = {} if text_config is None else text_config
        self.text_config = KimiLinearConfig(**text_config) if isinstance(text_config, dict) else text_config
        super().__init__(**kwargs)


def situ(gate, up, config):
    """Bounded SiLU times bounded up, in float32."""
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    gate, up = gate.float(), up.float()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


class KimiRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (scaled * self.weight.float()).to(x.dtype)


class KimiBlockSparseMLP(nn.Module):
    """One expert."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(situ(self.w1(x), self.w3(x), self.config).to(x.dtype))


class KimiMLP(nn.Module):
    """The dense MLP of layer 0, and the shared experts of others."""

    def __init__(self, config, inner):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config).to(x.dtype))


class KimiMoEGate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x):
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias.float()).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)


class KimiSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.routed_expert_hidden_size
        self.gate = KimiMoEGate(config)
        self.experts = nn.ModuleList([KimiBlockSparseMLP(config) for _ in range(config.num_experts)])
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.routed_expert_norm = KimiRMSNorm(width)
        self.routed_expert_up_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.shared_experts = KimiMLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x):
        chosen, weights = self.gate(x)
        z = self.routed_expert_down_proj(x)
        out = torch.zeros_like(z)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if len(token):
                out.index_add_(0, token, expert(z[token]) * weights[token, slot, None].to(z.dtype))
        return self.routed_expert_up_proj(self.routed_expert_norm(out)) + self.shared_experts(x)


class KimiAttention(nn.Module):
    """Causal attention, so that tokens see each other."""

    def __init__(self, config):
        super().__init__()
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(0, 1).flatten(1))


class KimiDecoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.self_attn = KimiAttention(config)
        self.input_layernorm = KimiRMSNorm(config.hidden_size)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size)
        self.self_attention_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.mlp_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        if index < config.first_k_dense_replace:
            self.mlp = KimiMLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = KimiSparseMoeBlock(config)

    def forward(self, x):
        x = x + self.self_attention_res_proj(x).sigmoid() * self.self_attn(self.input_layernorm(x))
        feed = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return x + self.mlp_res_proj(x).sigmoid() * feed(self.post_attention_layernorm(x))


class KimiLinearModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm = KimiRMSNorm(config.hidden_size)

    def forward(self, tokens):
        x = embedded = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x + self.output_attn_res_proj(x).sigmoid() * embedded)


class KimiLinearForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = KimiLinearModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.model(tokens))


class KimiK3ForConditionalGeneration(PreTrainedModel):
    config_class = KimiK3Config

    def __init__(self, config):
        super().__init__(config)
        self.mm_projector = nn.Linear(32, config.text_config.hidden_size, bias=False)
        self.language_model = KimiLinearForCausalLM(config.text_config)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding, KimiRMSNorm, KimiMoEGate)):
            for parameter in module.parameters(recurse=False):
                parameter.data.fill_(float("nan"))  # what is not loaded is noticed

    def forward(self, tokens):
        return self.language_model(tokens)


# What a folder of K3 has in its modeling file.
CODE = (
    *(KimiLinearConfig, KimiK3Config, situ, KimiRMSNorm, KimiBlockSparseMLP, KimiMLP, KimiMoEGate, KimiSparseMoeBlock),
    *(KimiAttention, KimiDecoderLayer, KimiLinearModel, KimiLinearForCausalLM, KimiK3ForConditionalGeneration),
)
IMPORTS = "import torch\nfrom torch import nn\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
                "zp_dtype": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "actorder": None,
                "block_structure": None,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
}
FORGOTTEN = (
    *("routed_expert_down_proj", "routed_expert_up_proj"),
    *("mlp_res_proj", "self_attention_res_proj", "output_attn_res_proj"),
)
LAYER = "language_model.model.layers.1.block_sparse_moe"
TOKENS = torch.tensor([7, 3, 70, 12, 12, 55, 0, 41, 9])
SPARSE = [f"language_model.model.layers.{layer}.block_sparse_moe" for layer in (1, 2)]


@pytest.fixture(scope="session")
def checkpoint():
    """Every tensor of a file by name: bfloat16, and experts of random bytes."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in KimiK3ForConditionalGeneration(KimiK3Config()).named_parameters()}
    tensors = {}
    for name, shape in shapes.items():
        if ".experts." in name:
            base, (n, k) = name.removesuffix(".weight"), shape
            codes = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
            tensors[f"{base}.weight_packed"] = codes
            tensors[f"{base}.weight_scale"] = torch.randint(
                119, 124, (n, k // 32), dtype=torch.uint8, generator=generator
            )
        else:
            scale = 1.0 if "embed" in name else 0.15
            values = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
            tensors[name] = values.bfloat16()
    return tensors


@pytest.fixture
def write_k3(tmp_path):
    """Two shards, an index and a config; `remote` puts the code beside them."""

    def write(tensors, folder="k3", remote=False, **experts):
        folder = tmp_path / folder
        folder.mkdir()
        names = sorted(tensors)
        index = {}
        for i, part in enumerate((names[::2], names[1::2])):
            file = f"model-{i + 1:05}-of-000002.safetensors"
            save_file({name: tensors[name].contiguous() for name in part}, folder / file, {"format": "pt"})
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        text = KimiLinearConfig().to_diff_dict() | {"model_type": "kimi_linear", "quantization_config": QUANTIZATION}
        config = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16"}
        if remote:
            kinds = {"AutoConfig": "KimiK3Config", "AutoModelForCausalLM": "KimiK3ForConditionalGeneration"}
            config["auto_map"] = {auto: f"modeling_kimi_k3.{name}" for auto, name in kinds.items()}
            code = "\n\n".join([IMPORTS, *(inspect.getsource(part) for part in CODE)])
            (folder / "modeling_kimi_k3.py").write_text(code)
        (folder / "config.json").write_text(json.dumps(config | {"text_config": text | experts}))
        return folder

    return write


@pytest.fixture(params=["config", "enabled"])
def load_k3(request):
    """A folder with an MXFP4Config, or after `enable` without one."""

    def load(folder, loader=KimiK3ForConditionalGeneration, **options):
        if request.param == "config":
            return loader.from_pretrained(folder, quantization_config=hf_mxfp4.MXFP4Config(), **options)
        with hf_mxfp4.enable():
            return loader.from_pretrained(folder, **options)

    return load


def reference(tensors, decoded):
    """Logits in float64 from the tensors of a file, without the classes above: all experts of all tokens at once."""

    def weight(name):
        if f"{name}.weight_packed" in tensors:
            return decoded(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]).double()
        return tensors[f"{name}.weight"].double()

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight(name)

    def activate(g, u):
        return 100 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * torch.tanh(u / 25)

    def mlp(x, name, gate="gate_proj", up="up_proj", down="down_proj"):
        return activate(x @ weight(f"{name}.{gate}").mT, x @ weight(f"{name}.{up}").mT) @ weight(f"{name}.{down}").mT

    def attend(x, name):
        q, k, v = (torch.stack((x @ weight(f"{name}.{p}_proj").mT).split(24, -1)) for p in "qkv")
        scores = (q @ k.mT / 24**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return torch.cat(list(scores.softmax(-1) @ v), -1) @ weight(f"{name}.o_proj").mT

    def sparse(x, name):
        scores = 1 / (1 + torch.exp(-(x @ weight(f"{name}.gate").mT)))
        biased = scores + tensors[f"{name}.gate.e_score_correction_bias"].double()
        kept = torch.where(biased >= biased.sort(-1, descending=True).values[:, 2:3], scores, 0)
        z = x @ weight(f"{name}.routed_expert_down_proj").mT
        outputs = torch.stack([mlp(z, f"{name}.experts.{e}", "w1", "w3", "w2") for e in range(6)], 1)
        routed = ((kept / kept.sum(-1, keepdim=True))[..., None] * outputs).sum(1)
        routed = norm(routed, f"{name}.routed_expert_norm") @ weight(f"{name}.routed_expert_up_proj").mT
        return routed + mlp(x, f"{name}.shared_experts")

    root = "language_model.model"
    x = embedded = weight(f"{root}.embed_tokens")[TOKENS]
    for layer in range(3):
        at = f"{root}.layers.{layer}"
        gate = torch.sigmoid(x @ weight(f"{at}.self_attention_res_proj").mT)
        x = x + gate * attend(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        gate, h = torch.sigmoid(x @ weight(f"{at}.mlp_res_proj").mT), norm(x, f"{at}.post_attention_layernorm")
        x = x + gate * (mlp(h, f"{at}.mlp") if layer == 0 else sparse(h, f"{at}.block_sparse_moe"))
    x = norm(x + torch.sigmoid(x @ weight(f"{root}.output_attn_res_proj").mT) * embedded, f"{root}.norm")
    return x @ weight("language_model.lm_head").mT


def assert_is_k3(model, checkpoint):
    """Experts hold the file's bytes and everything else its values, in the file's dtype."""
    hf_mxfp4.assert_packed(model)
    packed = {name for name, module in model.named_modules() if isinstance(module, MXFP4Linear)}
    assert packed == {f"{moe}.experts.{e}.{w}" for moe in SPARSE for e in range(6) for w in ("w1", "w2", "w3")}
    for name in packed:
        codes, scales = model.get_submodule(name).packed("weight")
        assert torch.equal(codes, checkpoint[f"{name}.weight_packed"]), name
        assert torch.equal(scales, checkpoint[f"{name}.weight_scale"]), name
    for name, tensor in checkpoint.items():
        if ".experts." not in name:
            held = model.get_parameter(name)
            assert held.dtype == model.dtype
            assert torch.equal(held, tensor.to(held.dtype)), name
    for kind in FORGOTTEN:
        modules = [module for name, module in model.named_modules() if name.endswith(kind)]
        assert modules
        assert all(type(module) is nn.Linear for module in modules), kind


def test_k3_loads_packed_and_computes_what_its_bytes_mean(checkpoint, write_k3, load_k3, decoded):
    model = load_k3(write_k3(checkpoint), dtype=torch.float32)
    assert_is_k3(model, checkpoint)
    expected, got = reference(checkpoint, decoded), model(TOKENS)
    assert (got - expected).norm() / expected.norm() < 2e-5
    report = hf_mxfp4.packed_report(model, check=True)
    assert [row.name for row in report.rows] == [f"{moe}.experts" for moe in SPARSE]
    assert {(row.source, row.conversion) for row in report.rows} == {("compressed-tensors", "kept byte for byte")}
    assert all(row.error < 1e-6 and row.bits_per_weight == 4.25 for row in report.rows)


def test_k3_in_bfloat16_is_finite_and_forgotten_layers_hold_the_files_values(checkpoint, write_k3, load_k3, decoded):
    model = load_k3(write_k3(checkpoint))
    assert model.dtype is torch.bfloat16
    assert_is_k3(model, checkpoint)
    expected, got = reference(checkpoint, decoded), model(TOKENS).float()
    assert got.isfinite().all()
    assert (got - expected).norm() / expected.norm() < 0.05  # a token's third expert may change


def test_k3_as_remote_code_beside_its_files(checkpoint, write_k3, load_k3, decoded):
    folder = write_k3(checkpoint, remote=True)
    options = {"trust_remote_code": True, "dtype": torch.float32}
    model = load_k3(folder, AutoModelForCausalLM, **options)
    assert type(model).__module__.startswith("transformers_modules")
    assert_is_k3(model, checkpoint)
    expected = reference(checkpoint, decoded)
    assert (model(TOKENS) - expected).norm() / expected.norm() < 2e-5


@pytest.mark.parametrize("remote", [False, True], ids=["registered", "remote code"])
def test_k3_is_saved_byte_for_byte(remote, checkpoint, write_k3, load_k3, tmp_path):
    folder = write_k3(checkpoint, remote=remote)
    loader = AutoModelForCausalLM if remote else KimiK3ForConditionalGeneration
    options = {"trust_remote_code": True} if remote else {}
    load_k3(folder, loader, **options).save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 1
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == checkpoint.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == checkpoint[name].dtype, name
        assert torch.equal(tensor, checkpoint[name]), name
    again = loader.from_pretrained(tmp_path / "saved", **options)  # our own folder, without a config or `enable`
    assert_is_k3(again, checkpoint)
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())
    said = stored.get("quantization_config") or stored["text_config"]["quantization_config"]
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "mxfp4-pack-quantized")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (f"{LAYER}.experts.4.w2.weight_packed", r"layers\.1\.block_sparse_moe\.experts\.4\.w2"),
        (f"{LAYER}.experts.4.w2.weight_scale", r"layers\.1\.block_sparse_moe\.experts\.4\.w2"),
        (f"{LAYER}.gate.e_score_correction_bias", r"layers\.1\.block_sparse_moe\.gate\.e_score_correction_bias"),
        (f"{LAYER}.routed_expert_up_proj.weight", r"layers\.1\.block_sparse_moe\.routed_expert_up_proj"),
        (f"{LAYER}.shared_experts.up_proj.weight", r"layers\.1\.block_sparse_moe\.shared_experts\.up_proj"),
    ],
)
def test_k3_with_a_tensor_missing_is_named(name, where, checkpoint, write_k3, load_k3):
    folder = write_k3({other: tensor for other, tensor in checkpoint.items() if other != name})
    with pytest.raises(hf_mxfp4.CheckpointError, match=where):
        load_k3(folder)


@pytest.mark.parametrize("count", [5, 7])
def test_k3_with_another_number_of_experts_is_named(count, checkpoint, write_k3, load_k3):
    """The config and the router agree, and the file's experts are 6."""
    router = {
        name: torch.cat([tensor, tensor])[:count]
        for name, tensor in checkpoint.items()
        if "block_sparse_moe.gate." in name
    }
    folder = write_k3(checkpoint | router, num_experts=count)
    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"block_sparse_moe\.experts\.{min(count, 6)}\."):
        load_k3(folder)


def test_k3s_config_is_found_where_it_is_and_left_there(checkpoint, write_k3, load_k3):
    folder = write_k3(checkpoint, remote=True)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = load_k3(folder, AutoModelForCausalLM, trust_remote_code=True)
    assert config.text_config.quantization_config["ignore"] == QUANTIZATION["ignore"]
    assert not hasattr(config, "quantization_config")
    assert model.hf_quantizer.quantization_config.stored["ignore"] == QUANTIZATION["ignore"]

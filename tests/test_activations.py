"""Activations as kernels know them: what they compute, and that they are recognised where and only where they stand.

S rows, I intermediate size.
"""

import copy
import importlib.util
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from hf_mxfp4 import MXFP4Experts
from hf_mxfp4.activations import CONSTANTS, KINDS, Activation, recognise
from hf_mxfp4.experts import find_experts

GPT_OSS = Activation(interleaved=True, alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0)


def sigmoid(v):
    return 1 / (1 + torch.exp(-v))


@pytest.mark.parametrize(
    ("activation", "exact"),
    [
        (Activation(), lambda g, u: g * sigmoid(g) * u),
        (Activation("gelu"), lambda g, u: g * (1 + torch.erf(g / math.sqrt(2))) / 2 * u),
        (
            Activation("gelu_tanh"),
            lambda g, u: g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2 * u,
        ),
        (Activation("relu2"), lambda g, u: g.clamp(min=0) ** 2 * u),
        (Activation("relu"), lambda g, u: g.clamp(min=0) * u),
        (Activation(alpha=1.702, up_add=1.0), lambda g, u: g * sigmoid(1.702 * g) * (u + 1)),
        (Activation(gate_max=2.0, up_max=3.0), lambda g, u: g.clamp(max=2) * sigmoid(g.clamp(max=2)) * u.clamp(-3, 3)),
        (Activation(act_max=1.5), lambda g, u: (g * sigmoid(g)).clamp(max=1.5) * u),
        (
            Activation(gate_cap=4.0, up_cap=25.0),
            lambda g, u: 4 * torch.tanh(g / 4) * sigmoid(g) * 25 * torch.tanh(u / 25),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_an_activation_computes(activation, exact, dtype):
    """In all three orders of its inputs, which stay as they are; an exact float64 formula beside it."""
    gate, up = 6 * torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    interleaved = Activation(activation.kind, True, True, *activation.constants)
    ungated = Activation(activation.kind, False, False, *activation.constants)
    for one, outputs, expected in (
        (activation, torch.cat([gate, up], dim=-1), exact(gate, up)),
        (interleaved, torch.stack([gate, up], dim=-1).flatten(-2), exact(gate, up)),
        (ungated, gate, exact(gate, torch.ones(())) / (1 + activation.up_add) if not activation.up_cap else None),
    ):
        before = outputs.to(dtype)
        given = before.clone()
        got = one(given)
        assert got.dtype is dtype
        assert torch.equal(given, before)
        if expected is not None:
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_constants_come_in_the_order_that_kernels_take_them_in():
    assert KINDS == ("sigmoid", "gelu", "gelu_tanh", "relu2", "relu")
    assert Activation(**dict(zip(CONSTANTS, range(1, 8), strict=True))).constants == (1, 2, 3, 4, 5, 6, 7)


# Recognised


class Gate(nn.Module):
    """A module whose activation is `function(self, gate, up)`; its attributes are where constants may be found."""

    def __init__(self, function, interleaved=False, **attributes):
        super().__init__()
        self.function, self.interleaved = function, interleaved
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, outputs):
        parts = (outputs[..., ::2], outputs[..., 1::2]) if self.interleaved else outputs.chunk(2, dim=-1)
        return self.function(self, *parts)


def clamped(module, gate, up):
    return F.silu(gate.clamp(max=module.limit)) * up.clamp(-module.limit, module.limit)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2", "relu"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations_of_transformers_are_recognised(name, interleaved):
    kinds = {"silu": "sigmoid", "swish": "sigmoid", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    expected = Activation(kinds.get(name, name), interleaved=interleaved)
    act = ACT2FN[name]
    module = Gate(lambda _, g, u: act(g) * u, interleaved)
    assert recognise(module, True, module) == expected
    assert recognise(act, False, nn.Module()) == Activation(expected.kind, gated=False)


def cuts(limit):
    """Cut after SiLU; from 16 on float32 does not tell it from a cut before, as SiLU is the gate there."""
    return Activation(act_max=limit, up_max=limit), *([Activation(gate_max=limit, up_max=limit)] * (limit >= 16))


@pytest.mark.parametrize("limit", [0.5, 7.0, 16.0, 100.0, 1000.0])
def test_limits_are_recognised_at_any_size(limit):
    module = Gate(clamped, limit=limit, layer_norm_eps=1e-6, router_scale=2.5)
    assert recognise(module, True, module) == Activation(gate_max=limit, up_max=limit)
    module = Gate(lambda m, g, u: F.silu(g).clamp(max=m.limit) * u.clamp(-m.limit, m.limit), limit=limit)
    assert recognise(module, True, module) in cuts(limit)


@pytest.mark.parametrize("limit", [7, 16, 100, 1000])
def test_a_limit_that_is_a_whole_number_is_not_missed(limit):
    """As Step 3.7's config may have it. Not to find one of 100 would be to leave it out."""
    module = Gate(clamped, limit=limit)
    found = recognise(module, True, module)
    assert found in (Activation(gate_max=limit, up_max=limit), None)


def test_a_limit_that_no_attribute_holds_is_not_missed():
    """Held by a config, or written into the code: then what is not recognised runs as the module's own code."""
    for limit in (7.0, 100.0, 1000.0):
        module = Gate(lambda _, g, u, limit=limit: F.silu(g.clamp(max=limit)) * u)
        assert recognise(module, True, module) is None


def test_constants_of_children_are_found():
    module = Gate(lambda m, g, u: m.inner.alpha * torch.tanh(g / m.inner.alpha) * torch.sigmoid(g) * u)
    module.inner = Gate(None, alpha=4.0)
    assert recognise(module, True, module) == Activation(gate_cap=4.0)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda _, g, u: F.mish(g) * u, id="Mish"),
        pytest.param(lambda _, g, u: F.softplus(g) * u, id="softplus"),
        pytest.param(lambda _, g, u: F.leaky_relu(g) * u, id="leaky ReLU"),
        pytest.param(lambda _, g, u: F.silu(u) * g, id="up before gate"),
        pytest.param(lambda _, g, u: F.silu(g) + u, id="a sum"),
        pytest.param(lambda _, g, u: F.silu(g) * u * 1.001, id="a factor"),
        pytest.param(lambda _, g, u: F.silu(g * 1.001) * u, id="another alpha"),
        pytest.param(lambda _, g, u: F.silu(g) * (u + 1e-3), id="something added"),
        pytest.param(lambda _, g, u: F.silu(g.clamp(-2, 2)) * u, id="a limit from below"),
        pytest.param(lambda _, g, u: F.silu(g.bfloat16()).float() * u, id="rounded"),
        pytest.param(lambda _, g, u: F.silu(g) * u.flip(-1), id="columns that change places"),
        pytest.param(lambda _, g, u: F.softmax(g, dim=-1) * u, id="columns that mix"),
        pytest.param(lambda _, g, u: (F.silu(g) * u).half(), id="another dtype"),
        pytest.param(lambda _, g, u: F.silu(g), id="the gate alone"),
        pytest.param(lambda _, g, u: (F.silu(g) * u)[:, :-1], id="another width"),
        pytest.param(lambda _, g, u: F.silu(g) * u + torch.nan, id="NaN"),
        pytest.param(lambda _, g, u: F.glu(g) * u, id="code that fails"),
        pytest.param(lambda m, g, u: F.silu(g) * u * m.not_there, id="an attribute that is missing"),
    ],
)
def test_what_is_another_activation_is_not_recognised(function):
    module = Gate(function, alpha=1.702, limit=7.0)
    assert recognise(module, True, module) is None


def test_an_activation_that_learns_is_not_frozen_as_it_was():
    """What a parameter makes of it is known only when it runs: it may be loaded and trained after that."""
    module = Gate(lambda m, g, u: F.silu(g) * u * m.scale)
    module.scale = nn.Parameter(torch.ones(()))
    assert recognise(module, True, module) is None


def test_looking_changes_nothing():
    module = Gate(lambda _, g, u: g.sigmoid_().mul_(u))  # in place, on what it is given
    before = torch.random.get_rng_state()
    assert recognise(module, True, module) is None
    assert torch.equal(torch.random.get_rng_state(), before)
    counted = Gate(lambda _, g, u: F.silu(g, inplace=True).mul_(u))
    assert recognise(counted, True, counted) == Activation()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_defaults_of_a_model_that_loads_make_no_difference(dtype, stock_experts):
    stock = stock_experts("gpt_oss")
    torch.set_default_dtype(dtype)
    try:
        assert MXFP4Experts(stock).known_activation == GPT_OSS
        with torch.device("meta"):
            assert MXFP4Experts(stock).known_activation == GPT_OSS
    finally:
        torch.set_default_dtype(torch.float32)
    assert MXFP4Experts(stock.to("meta")).known_activation == GPT_OSS
    with torch.inference_mode():
        assert MXFP4Experts(stock).known_activation == GPT_OSS


def test_one_that_is_not_known_runs_as_the_modules_own(stock_experts, monkeypatch):
    """Not through the whole MLP, which would compute another one."""
    stock = stock_experts("mixtral")
    stock.act_fn = nn.Mish()
    packed = MXFP4Experts.from_dense(stock)
    assert packed.known_activation is None
    monkeypatch.setattr("hf_mxfp4.ops.experts_mlp", None)
    hidden, ids, weights = torch.randn(9, 64), torch.randint(4, (9, 2)), torch.rand(9, 2)
    got, exact = packed(hidden, ids, weights), packed.dequantize()(hidden, ids, weights)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


def test_a_copy_and_a_cast_keep_it(stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("gpt_oss"))
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), packed.to(torch.bfloat16)):
        assert other.known_activation == GPT_OSS
    assert not hasattr(packed.dequantize(), "known_activation")


# Every family

CLAMPED = Activation(gate_max=10.0, up_max=10.0)
SOFT_CAPPED = Activation(gate_cap=4.0, up_cap=25.0)
NOT_SILU = {
    "DeepseekV4Experts": CLAMPED,
    "DiffusionGemmaTextExperts": Activation("gelu_tanh"),
    "Gemma4TextExperts": Activation("gelu_tanh"),
    "Glm5NextTextExperts": CLAMPED,
    "GptOssExperts": GPT_OSS,
    "HYV4Experts": CLAMPED,
    "HYV4VLExperts": CLAMPED,
    "Inkling2Experts": SOFT_CAPPED,
    "Inkling2LoopExperts": SOFT_CAPPED,
    "MiniMaxM3VLExperts": Activation(alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0),
    "NemotronHExperts": Activation("relu2", gated=False),
    "OpenAIPrivacyFilterExperts": Activation(alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0),
}
NOT_KNOWN = set()
"""Classes that are packed and whose activation kernels do not know."""


@pytest.fixture(scope="module")
def families():
    """The module of tests that knows a tiny config of every family."""
    path = Path(__file__).parent / "quantizer" / "test_families.py"
    spec = importlib.util.spec_from_file_location("families_of_transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_activation_of_every_family_is_known(families):
    """Each experts class that can be packed, by name; all that are not named here have SiLU after the gate."""
    found = {}
    for family in families.FAMILIES:
        try:
            model = families.build(family)
        except pytest.skip.Exception:
            continue
        for _, experts in find_experts(model):
            found[type(experts).__name__] = MXFP4Experts(experts).known_activation
    assert {name for name, activation in found.items() if activation is None} == NOT_KNOWN
    others = {name: activation for name, activation in found.items() if activation not in (None, Activation())}
    assert others == {name: activation for name, activation in NOT_SILU.items() if name in found}
    if not families.OLDER:
        assert len(found) >= 72
        assert NOT_SILU.keys() <= found.keys()


@pytest.mark.parametrize("limit", [7.0, 16.0, None])
def test_step3p7_cuts_what_comes_after_the_activation(limit):
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = modeling.Step3p7Experts.__init__.__globals__["Step3p7TextConfig"](
        hidden_size=64, moe_intermediate_size=32, intermediate_size=32, num_hidden_layers=2
    )
    config._experts_implementation = "eager"
    experts = modeling.Step3p7Experts(config, swiglu_limit=limit)
    cut = math.inf if limit is None else limit
    assert MXFP4Experts(experts).known_activation in cuts(cut)

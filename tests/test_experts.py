"""MXFP4Experts against Transformers' own classes, whose weights ml_dtypes decodes from the packed bytes in float64.

E experts, H hidden size, I intermediate size, T tokens, k experts a token.
"""

import copy
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import load_file, save_file
from torch import nn

from hf_mxfp4 import MXFP4Experts, quantize
from hf_mxfp4.experts import find_experts

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "nemotron_h latent", "muse_spark"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
RELATIVE = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float64: 1e-12}


@pytest.fixture
def packed_experts(stock_experts):
    """packed_experts(family, E, H, I, dtype) -> MXFP4Experts of a stock module of its own."""

    def packed_experts(family="mixtral", *sizes, **options):
        return MXFP4Experts.from_dense(stock_experts(family, *sizes, **options))

    return packed_experts


@pytest.fixture
def oracle(decode):
    """oracle(packed) -> the stock class in float64, with weights that ml_dtypes decodes and copies of the rest."""

    def oracle(packed):
        stock = packed.dense_class(packed.config).double()
        for name, parameter in stock.named_parameters():
            if name in packed.projection_names:
                weight = decode(
                    packed.get_parameter(f"{name}_blocks").data, packed.get_parameter(f"{name}_scales").data
                )
                parameter.data = (weight.mT if packed.is_transposed else weight).contiguous()
            else:
                parameter.data = packed.get_parameter(name).data.double()
        return stock

    return oracle


def projections(stock):
    return {name: p for name, p in stock.named_parameters() if name in ("gate_up_proj", "up_proj", "down_proj")}


def routes(module, tokens=7, k=2, dtype=torch.float32):
    """Hidden states, ids that are distinct in a row where they can be, and weights that sum to one."""
    width = 2 * module.get_parameter(f"{module.projection_names[0]}_blocks").shape[-1]
    generator = torch.Generator().manual_seed(tokens + k)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    scores = torch.randn(tokens, max(k, module.num_experts), generator=generator)
    weights, ids = scores.softmax(-1).topk(k)
    return hidden, ids % module.num_experts, weights / weights.sum(-1, keepdim=True)


def expected(oracle, hidden, ids, weights):
    """What the stock module says in float64. It knows no sentinels: their routes get expert 0 and weight 0."""
    valid = (ids >= 0) & (ids < oracle.num_experts)
    with torch.no_grad():
        return oracle(hidden.double(), ids.long().masked_fill(~valid, 0), weights.double().masked_fill(~valid, 0))


def assert_near(got, exact):
    torch.testing.assert_close(
        got.double(), exact, rtol=RELATIVE[got.dtype], atol=RELATIVE[got.dtype] * exact.abs().amax().item()
    )


# The numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_the_stock_class(family, packed_experts, oracle):
    packed = packed_experts(family)
    arguments = routes(packed)
    assert_near(packed(*arguments), expected(oracle(packed), *arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_autograd_of_the_stock_class(family, packed_experts, oracle):
    packed = packed_experts(family)
    stock = oracle(packed)
    hidden, ids, weights = routes(packed)
    out_grad = torch.randn_like(hidden)
    grads = []
    for module, dtype in ((packed, torch.float32), (stock, torch.float64)):
        x, w = (tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weights))
        module(x, ids, w).backward(out_grad.to(dtype))
        trained = {name: p.grad for name, p in module.named_parameters() if name not in packed.projection_names}
        grads.append({"hidden": x.grad, "weights": w.grad} | {n: g for n, g in trained.items() if g is not None})
    assert grads[0].keys() == grads[1].keys()
    assert ("gate_up_proj_bias" in grads[0]) == (family == "gpt_oss")
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad.double(), grads[1][name], rtol=1e-4, atol=1e-5 * grads[1][name].abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_output_dtype_follows_the_hidden_states(family, dtype, packed_experts, oracle):
    packed = packed_experts(family, dtype=torch.bfloat16)
    hidden, ids, weights = routes(packed, dtype=dtype)
    got = packed(hidden, ids, weights)
    assert got.dtype is dtype
    assert_near(got, expected(oracle(packed), hidden, ids, weights))


def test_float16_activations_that_overflow_give_no_nan(stock_experts):
    """gate * up is 72900, past float16. Rows of down give it, its difference with itself, half of it, and none."""
    stock = stock_experts("mixtral", 1, 32, 32)
    gate_up, down = torch.zeros(1, 64, 32), torch.zeros(1, 32, 32)
    gate_up[0, [0, 1, 32, 33], 0] = 6.0
    down[0, 0, 0], down[0, 1, 0], down[0, 1, 1], down[0, 2, 0], down[0, 3, 0] = 1, 1, -1, 0.5, -1
    stock.gate_up_proj.data, stock.down_proj.data = gate_up, down
    hidden = torch.zeros(1, 32, dtype=torch.float16)
    hidden[0, 0] = 45.0
    got = MXFP4Experts.from_dense(stock)(hidden, torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.float16))
    exact = torch.tensor([72900.0, 0.0, 36450.0, -72900.0, *[0.0] * 28], dtype=torch.float64)
    assert torch.equal(got[0], exact.half())
    assert got[0, 0].isinf()


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 63, 64, 65, 127, 129, 257])  # around tiles of 8, 64, 128
def test_token_counts_around_tile_edges(tokens, packed_experts, oracle):
    packed = packed_experts("qwen3_moe", 5, 32, 32)
    arguments = routes(packed, tokens)
    assert_near(packed(*arguments), expected(oracle(packed), *arguments))


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "k"),
    [
        pytest.param(1, 32, 32, 1, id="one expert, one block"),
        pytest.param(3, 64, 96, 2, id="I of three blocks"),
        pytest.param(5, 160, 32, 2, id="H of five blocks"),
        pytest.param(3, 32, 64, 5, id="k above E"),
        pytest.param(33, 32, 32, 4, id="E no multiple of a tile"),
        pytest.param(128, 32, 32, 8, id="E of Qwen3-MoE"),
        pytest.param(896, 32, 32, 16, id="E of Kimi K3"),
        pytest.param(2, 2880, 32, 2, id="H of gpt-oss, 90 blocks"),
        pytest.param(2, 32, 2880, 2, id="I of gpt-oss, 90 blocks"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_sizes_that_no_tile_divides(family, experts, hidden, intermediate, k, packed_experts, oracle):
    packed = packed_experts(family, experts, hidden, intermediate)
    arguments = routes(packed, 5, k)
    assert_near(packed(*arguments), expected(oracle(packed), *arguments))


# Routes and inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_gives_no_row_and_a_gradient(family, dtype, packed_experts):
    packed = packed_experts(family)
    hidden, ids, weights = routes(packed, 0, dtype=dtype)
    hidden.requires_grad_()
    got = packed(hidden, ids, weights)
    assert (got.shape, got.dtype, got.device) == (hidden.shape, dtype, hidden.device)
    got.sum().backward()
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_sentinels_contribute_nothing_not_even_a_nan_or_a_bias(family, packed_experts, oracle):
    packed = packed_experts(family)
    hidden, ids, weights = routes(packed)
    ids[0], ids[1, 0], ids[2, 1], ids[3] = torch.tensor([-1, 4]), -1, 4, torch.tensor([-100, 100])
    exact = expected(oracle(packed), hidden, ids, weights)
    weights[1, 0] = weights[2, 1] = torch.nan
    hidden.requires_grad_()
    got = packed(hidden, ids, weights)
    assert_near(got, exact)
    assert not got[[0, 3]].any()
    got.sum().backward()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[[0, 3]].any()


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[1, 1], [2, 2]], id="an expert twice in a row"),
        pytest.param([[0, 0]] * 5, id="all tokens on expert 0"),
        pytest.param([[-1, -1]] * 2, id="only sentinels"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_lopsided_routes(family, ids, packed_experts, oracle):
    packed = packed_experts(family)
    hidden, _, _ = routes(packed, len(ids))
    arguments = hidden, torch.tensor(ids), torch.tensor([[0.3, 0.7]]).expand(len(ids), 2)
    assert_near(packed(*arguments), expected(oracle(packed), *arguments))


def test_an_expert_twice_counts_with_the_sum_of_its_weights(packed_experts):
    packed = packed_experts()
    hidden, _, _ = routes(packed, 1)
    once = packed(hidden, torch.tensor([[1]]), torch.tensor([[1.0]]))
    torch.testing.assert_close(packed(hidden, torch.tensor([[1, 1]]), torch.tensor([[0.3, 0.7]])), once)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_other_integer_ids_float_weights_and_strides(family, packed_experts, oracle):
    packed = packed_experts(family)
    hidden, ids, weights = routes(packed)
    exact = expected(oracle(packed), hidden, ids, weights)
    strided = [tensor.mT.contiguous().mT for tensor in (hidden, ids.int(), weights)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    before = [tensor.clone() for tensor in strided]
    assert_near(packed(*strided), exact)
    for tensor, was in zip(strided, before, strict=True):
        assert torch.equal(tensor, was)
    rounded = weights.bfloat16()
    assert_near(packed(hidden, ids, rounded), expected(oracle(packed), hidden, ids, rounded))


def test_a_nan_token_stays_one_row(packed_experts):
    packed = packed_experts("gpt_oss")
    hidden, ids, weights = routes(packed)
    hidden[2] = torch.nan
    assert packed(hidden, ids, weights).isnan().any(-1).tolist() == [False, False, True, *[False] * 4]


def test_same_inputs_same_bits(packed_experts):
    packed = packed_experts()
    arguments = routes(packed, 65, 4)
    assert torch.equal(packed(*arguments), packed(*arguments))


def test_autocast_does_not_lower_the_sums(packed_experts):
    packed = packed_experts("gpt_oss")
    arguments = routes(packed)
    with torch.autocast("cpu", torch.bfloat16):
        got = packed(*arguments)
    assert torch.equal(got, packed(*arguments))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_compiles_as_one_graph(family, packed_experts):
    packed = packed_experts(family, 4, 96, 64)  # a width that no power of two divides
    arguments = routes(packed)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), packed(*arguments))


# What it holds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_parameters_are_the_quantized_projections(family, dtype, stock_experts):
    """Canonical: [E, out, in / 2], also where the class holds [E, in, out]. The dense module is left as it is."""
    stock = stock_experts(family, 3, 64, 96, dtype=dtype)
    before = copy.deepcopy(stock.state_dict())
    packed = MXFP4Experts.from_dense(stock, "even", "away")
    names = {f"{proj}_{part}" for proj in projections(stock) for part in ("blocks", "scales")}
    assert packed.state_dict().keys() == (before.keys() - projections(stock).keys()) | names
    for proj, weight in projections(stock).items():
        exact = quantize(weight.mT if stock.is_transposed else weight, "even", "away")
        for part, tensor in zip(("blocks", "scales"), exact, strict=True):
            parameter = packed.get_parameter(f"{proj}_{part}")
            assert torch.equal(parameter.data, tensor)
            assert (parameter.dtype, parameter.requires_grad, parameter.ndim) == (torch.uint8, False, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stock.state_dict().items())


@pytest.mark.parametrize(
    "cast",
    [
        pytest.param(lambda module: module.half(), id="half"),
        pytest.param(lambda module: module.float(), id="float"),
        pytest.param(lambda module: module.double(), id="double"),
        pytest.param(lambda module: module.to(torch.bfloat16), id="to bfloat16"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_casts_leave_packed_bytes_alone(family, cast, packed_experts, oracle):
    packed = packed_experts(family)
    before = {name: p.clone() for name, p in packed.named_parameters() if p.dtype is torch.uint8}
    assert len(before) == 4
    cast(packed)
    for name, was in before.items():
        assert packed.get_parameter(name).dtype is torch.uint8
        assert torch.equal(packed.get_parameter(name), was)
    for dtype in DTYPES:
        hidden, ids, weights = routes(packed, dtype=dtype)
        assert_near(packed(hidden, ids, weights), expected(oracle(packed), hidden, ids, weights))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_copies_are_whole_and_apart(how, family, packed_experts):
    packed = packed_experts(family)
    other = how(packed)
    arguments = routes(packed)
    assert torch.equal(other(*arguments), packed(*arguments))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, packed.get_parameter(name))
        assert parameter.requires_grad == packed.get_parameter(name).requires_grad
        assert parameter.data_ptr() != packed.get_parameter(name).data_ptr()


@pytest.mark.parametrize(("experts", "hidden", "intermediate"), [(3, 64, 96), (5, 160, 32)])  # no powers of two
@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_goes_through_a_file_byte_for_byte(family, experts, hidden, intermediate, stock_experts, tmp_path):
    """Also after a forward pass, and into a module that held other weights."""
    packed = MXFP4Experts.from_dense(stock_experts(family, experts, hidden, intermediate))
    before = copy.deepcopy(packed.state_dict())
    arguments = routes(packed)
    exact = packed(*arguments)
    save_file(packed.state_dict(), tmp_path / "experts.safetensors")
    other = MXFP4Experts.from_dense(stock_experts(family, experts, hidden, intermediate, seed=1))
    assert not torch.equal(other(*arguments), exact)
    other.load_state_dict(load_file(tmp_path / "experts.safetensors"), strict=True)
    for name, tensor in other.state_dict().items():
        assert tensor.dtype is before[name].dtype
        assert torch.equal(tensor, before[name])
    assert torch.equal(other(*arguments), exact)
    del before["down_proj_scales"]
    with pytest.raises(RuntimeError, match="down_proj_scales"):
        other.load_state_dict(before, strict=True)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_dequantize_returns_the_stock_class(family, dtype, packed_experts, decode, oracle):
    packed = packed_experts(family)
    stock = packed.dequantize(dtype)
    assert type(stock) is packed.dense_class
    assert stock.state_dict().keys() == oracle(packed).state_dict().keys()
    for name, parameter in projections(stock).items():
        exact = decode(*packed.packed(name))
        assert torch.equal(parameter, (exact.mT if packed.is_transposed else exact).to(dtype or torch.float32))
    if dtype is not torch.bfloat16:
        hidden, ids, weights = routes(packed)
        assert_near(stock(hidden, ids, weights), expected(oracle(packed), hidden, ids, weights))


def test_dequantize_after_a_cast_can_run(packed_experts):
    packed = packed_experts("gpt_oss").to(torch.bfloat16)
    hidden, ids, weights = routes(packed, dtype=torch.bfloat16)
    packed.dequantize()(hidden, ids, weights.bfloat16())


def test_hooks_of_the_other_module_do_not_come_along(packed_experts, stock_experts):
    """As after `from_pretrained(device_map=...)` over two devices."""
    stock, packed = stock_experts("mixtral"), packed_experts("mixtral")
    arguments = routes(packed)
    exact = packed(*arguments)
    add_hook_to_module(stock, ModelHook())
    assert torch.equal(MXFP4Experts.from_dense(stock)(*arguments), exact)
    add_hook_to_module(packed, ModelHook())
    dense = packed.dequantize()
    dense.down_proj.data.zero_()
    assert not dense(*arguments).any()


def test_training_mode_is_kept(stock_experts):
    assert not MXFP4Experts.from_dense(stock_experts("mixtral").eval()).training


def test_model_code_may_still_look_at_the_projection(packed_experts, stock_experts):
    """Some `_init_weights` and some conversions do; it is on meta, and no parameter of the module."""
    for family in ("mixtral", "gpt_oss", "nemotron_h"):
        stock, packed = stock_experts(family), packed_experts(family)
        for proj, weight in projections(stock).items():
            stand_in = getattr(packed, proj)
            assert (stand_in.shape, stand_in.dtype, stand_in.device.type) == (weight.shape, weight.dtype, "meta")
            assert proj not in dict(packed.named_parameters())
    assert not hasattr(packed_experts("mixtral"), "up_proj")
    assert not hasattr(packed_experts("nemotron_h"), "gate_up_proj")


def test_find_experts_tells_packed_from_dense_from_neither(packed_experts, stock_experts):
    model = nn.ModuleDict({"a": packed_experts(), "b": stock_experts("gpt_oss"), "c": nn.Linear(32, 32)})
    assert dict(find_experts(model)) == {"a": model["a"], "b": model["b"]}


# What it refuses to take


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_that_are_no_multiple_of_32_are_refused_by_name(family, stock_experts):
    first = "up_proj" if "nemotron" in family else "gate_up_proj"
    with pytest.raises(ValueError, match=rf"moe\.{first}: width 40.*multiple of 32"):
        MXFP4Experts(stock_experts(family, 4, 40, 64), name="moe")
    with pytest.raises(ValueError, match=r"down_proj: width 48.*multiple of 32"):
        MXFP4Experts.from_dense(stock_experts(family, 4, 64, 48))


def test_a_weight_that_is_not_finite_is_refused_by_projection_and_expert(stock_experts):
    stock = stock_experts("gpt_oss")
    stock.down_proj.data[2, 5, 7] = torch.inf  # [E, in, out]
    with pytest.raises(ValueError, match=r"down_proj\[2\] holds inf at index \[7, 5\]"):
        MXFP4Experts.from_dense(stock)


def test_a_module_without_expert_projections_is_refused():
    with pytest.raises(ValueError, match=r"moe is a Linear, which has no 3-D expert projections"):
        MXFP4Experts(nn.Linear(32, 32), name="moe")


def test_packing_what_is_packed_is_refused(packed_experts):
    """Its projections are stand-ins on meta."""
    with pytest.raises(ValueError, match=r"experts is a MXFP4Experts, which has no 3-D expert projections"):
        MXFP4Experts.from_dense(packed_experts())


# Calls that do not fit


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, i, w: (x, i[:3], w), ValueError, r"top_k_index \[3, 2\] do not fit 7 hidden_states"),
        (lambda x, i, w: (x, i, w[:, :1]), ValueError, r"top_k_weights \[7, 1\] do not fit"),
        (lambda x, i, w: (x[None], i, w), ValueError, r"hidden_states \[1, 7"),
        (lambda x, i, w: (x, i.float(), w), TypeError, "top_k_index has dtype torch.float32"),
        (lambda x, i, w: (x,), TypeError, "takes hidden_states, top_k_index and top_k_weights"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(packed_experts, change, error, message):
    packed = packed_experts("mixtral")
    with pytest.raises(error, match=message):
        packed(*change(*routes(packed)))


def test_packed_bytes_on_meta_give_no_numbers(packed_experts):
    packed = packed_experts("mixtral")
    arguments = routes(packed)
    with pytest.raises(ValueError, match="on meta, where they have no values"):
        packed.to("meta")(*arguments)


def test_biases_of_two_dtypes_are_taken_as_they_are(stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("gpt_oss")).requires_grad_(False)
    arguments = routes(packed)
    packed.down_proj_bias.data = packed.down_proj_bias.data.bfloat16().float()
    expected = packed(*arguments)
    packed.down_proj_bias.data = packed.down_proj_bias.data.bfloat16()
    torch.testing.assert_close(packed(*arguments), expected)


def test_an_activation_that_is_changed_after_packing_is_the_one_that_runs(stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("mixtral")).requires_grad_(False)
    arguments = routes(packed)
    for activation in (torch.nn.GELU(), torch.nn.Mish()):
        packed.act_fn = activation
        assert packed.fusable is isinstance(activation, torch.nn.GELU)
        hidden = arguments[0].clone().requires_grad_(True)  # so that the module's own code runs
        torch.testing.assert_close(packed(*arguments), packed(hidden, *arguments[1:]).detach(), rtol=1e-5, atol=1e-5)

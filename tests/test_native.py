"""The native CPU kernels, with every instruction set that runs here, against float64 over decoded weights.

The decode is that of ml_dtypes.

E experts, N output features, K input features, H hidden size, I intermediate size, T tokens, k experts a token.
"""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_mxfp4 import MXFP4Experts, ops, quantize
from hf_mxfp4.activations import Activation
from hf_mxfp4.backends import cpu

pytestmark = pytest.mark.skipif(isinstance(cpu._library(), str), reason=f"no native library: {cpu._library()}")

TRANSPOSED = pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
EXACT = 2e-6
"""Allowed of a sum of float32 products, relative to what it would be if nothing cancelled."""
MIXED = {torch.float32: 2e-6, torch.bfloat16: 2.6e-3}
"""Allowed of whole expert MLPs, norm of the difference over norm. With bfloat16 the activations between the projections
and the output are rounded to 8 bits of fraction, which is 1.7e-3 of the norm each."""


def usable_sets():
    library = cpu._library()
    if isinstance(library, str):
        return []
    return [library.mxfp4_name(i).decode() for i in range(library.mxfp4_count()) if library.mxfp4_usable(i)]


@pytest.fixture(params=usable_sets())
def isa(request, monkeypatch):
    """Each instruction set that this processor runs."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, request.param)
    assert cpu.instruction_set() == request.param
    return request.param


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def offsets_of(*counts):
    return torch.tensor([0, *counts]).cumsum(0)


def allowed(isa, operand, transpose=False):
    """AVX2 multiplies bfloat16 as whole numbers of 16 bits, the largest of 32 being 32767."""
    return 2e-4 if (isa, operand, transpose) == ("avx2", "bfloat16", False) else EXACT


def round_int8(x):
    """To 127 steps in each direction for every 32 columns, in float32 as the kernels do."""
    groups = x.float().unflatten(-1, (-1, 32))
    step = groups.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(step > 0, (groups / step).round() * step, groups).flatten(-2)


def random_rows(rows, width, operand, seed=0):
    """Float32 rows that the operand loses nothing of, but for int8."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().float() if operand == "bfloat16" else x


def assert_summed(got, x, weights, counts, transpose, tolerance):
    """Every element of grouped_linear is the sum that it should be; rows that are nobody's are zero.

    `weights` float64 [E, N, K]. The tolerance is relative to the sum of magnitudes, element by element, so that a
    row, a column or a token that is wrong cannot hide among many that are right.
    """
    by_row = weights.repeat_interleave(torch.tensor(counts), dim=0)
    x = x[: sum(counts)].double()
    equation = "snk,sn->sk" if transpose else "snk,sk->sn"
    exact = torch.einsum(equation, by_row, x)
    magnitude = torch.einsum(equation, by_row.abs(), x.abs())
    assert got.dtype is torch.float32
    assert got.shape == (got.shape[0], exact.shape[1])
    excess = (got[: sum(counts)].double() - exact).abs() / magnitude.clamp(min=1e-37)
    assert (excess <= tolerance).all(), f"off by {excess.max():.1e} at {(excess > tolerance).nonzero()[0].tolist()}"
    assert not got[sum(counts) :].any()


# grouped_linear


SHAPES = [
    pytest.param(32, 1, [1], 0, id="one block, one row"),
    pytest.param(64, 2, [0, 2], 0, id="half a chunk, an expert without rows"),
    pytest.param(96, 3, [3, 0, 1], 2, id="three blocks, rows that are nobody's"),
    pytest.param(128, 5, [4, 5], 0, id="a chunk"),
    pytest.param(160, 33, [6, 7, 8, 9], 0, id="a chunk and a block, N past tiles and panels"),
    pytest.param(224, 257, [13, 1], 1, id="three blocks past a chunk, N past what one call of a kernel takes"),
    pytest.param(672, 23, [0, 14, 15, 2], 0, id="K past what a transposed call takes"),
    pytest.param(1088, 7, [24, 25], 0, id="34 groups, more than a vector of scales"),
    pytest.param(2880, 66, [3, 70, 0], 0, id="K of gpt-oss, tokens past a transposed call"),
    pytest.param(4160, 4, [130], 0, id="130 groups, more tokens than stay in cache"),
]


@TRANSPOSED
@pytest.mark.parametrize("operand", ops.OPERANDS)
@pytest.mark.parametrize(("width", "features", "counts", "nobodys"), SHAPES)
def test_sums(width, features, counts, nobodys, operand, transpose, isa, random_packed, decode):
    blocks, scales = random_packed(len(counts), features, width)
    x = random_rows(sum(counts) + nobodys, features if transpose else width, operand)
    got = ops.grouped_linear(
        x, blocks, scales, offsets_of(*counts), transpose=transpose, operand=operand, backend="cpu"
    )
    taken = round_int8(x) if operand == "int8" and not transpose else x
    assert_summed(got, taken, decode(blocks, scales), counts, transpose, allowed(isa, operand, transpose))


@TRANSPOSED
@pytest.mark.parametrize("operand", ops.OPERANDS)
def test_every_number_of_rows(operand, transpose, isa, random_packed, decode):
    """An expert each with 0 to 26 rows: every size of a last tile."""
    counts = list(range(27))
    blocks, scales = random_packed(len(counts), 6, 160)
    x = random_rows(sum(counts), 6 if transpose else 160, operand)
    got = ops.grouped_linear(
        x, blocks, scales, offsets_of(*counts), transpose=transpose, operand=operand, backend="cpu"
    )
    taken = round_int8(x) if operand == "int8" and not transpose else x
    assert_summed(got, taken, decode(blocks, scales), counts, transpose, allowed(isa, operand, transpose))


@TRANSPOSED
@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", range(1, 30))
def test_every_number_of_features(features, operand, transpose, isa, random_packed, decode):
    counts = [1, 2, 5, 30]
    blocks, scales = random_packed(len(counts), features, 96)
    x = random_rows(sum(counts), features if transpose else 96, operand)
    got = ops.grouped_linear(
        x, blocks, scales, offsets_of(*counts), transpose=transpose, operand=operand, backend="cpu"
    )
    assert_summed(got, x, decode(blocks, scales), counts, transpose, allowed(isa, operand, transpose))


@TRANSPOSED
@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
def test_rows_before_the_first_expert_are_not_read(operand, transpose, isa, random_packed, decode):
    """`offsets` may begin past 0; what such rows give is not specified."""
    blocks, scales = random_packed(2, 5, 96)
    x = random_rows(8, 5 if transpose else 96, operand)
    got = ops.grouped_linear(
        x, blocks, scales, torch.tensor([2, 5, 8]), transpose=transpose, operand=operand, backend="cpu"
    )
    assert_summed(got[2:], x[2:], decode(blocks, scales), [3, 3], transpose, allowed(isa, operand, transpose))


@TRANSPOSED
@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 40])
def test_rows_with_scales_of_every_size(tokens, operand, transpose, isa, random_packed, decode):
    """Rows whose scales are all ordinary, all extreme, or of both kinds; and blocks of zeros with scale byte 0."""
    blocks, _ = random_packed(1, 64, 288)
    generator = torch.Generator().manual_seed(1)
    scales = torch.randint(0, 201, (1, 64, 9), dtype=torch.uint8, generator=generator)
    scales[0, ::3] = 130
    scales[0, 3, 8] = 2
    blocks[0, :, 16:32] = 0x80
    blocks[0, ::2, 80:96] = 0
    scales[0, :, 1] = 0
    scales[0, ::2, 5] = 0
    x = random_rows(tokens, 64 if transpose else 288, operand)
    got = ops.grouped_linear(x, blocks, scales, offsets_of(tokens), transpose=transpose, operand=operand, backend="cpu")
    assert_summed(got, x, decode(blocks, scales), [tokens], transpose, allowed(isa, operand, transpose))


@TRANSPOSED
@pytest.mark.parametrize("operand", ops.OPERANDS)
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("power", [-80, -40, 40, 80])
def test_activations_of_any_size(power, tokens, operand, transpose, isa, random_packed, decode):
    """Large activations meet small scales and the other way round, so that results are of size 1."""
    blocks, scales = random_packed(1, 33, 160)
    scales -= power
    x = random_rows(tokens, 33 if transpose else 160, operand) * 2.0**power
    got = ops.grouped_linear(x, blocks, scales, offsets_of(tokens), transpose=transpose, operand=operand, backend="cpu")
    taken = round_int8(x) if operand == "int8" and not transpose else x
    assert_summed(got, taken, decode(blocks, scales), [tokens], transpose, allowed(isa, operand, transpose))


@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_one_hot_rows_return_every_code_under_every_scale(tokens, operand, isa, decode):
    """A row for each scale byte, with every code byte in its 512 columns; each column's token among others.

    One float32 weight that is infinite makes the sum NaN for every token, as 0 * inf is.
    """
    copies = -(-512 // tokens)
    blocks = torch.arange(256, dtype=torch.uint8).expand(copies, 256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(copies, 256, 16).contiguous()
    x = torch.eye(512).repeat(2, 1)[: copies * tokens]
    got = ops.grouped_linear(x, blocks, scales, torch.arange(copies + 1) * tokens, operand=operand, backend="cpu")
    weights = decode(blocks[0], scales[0]).float().T
    expected = torch.where(weights.isfinite().all(dim=0), weights, torch.nan)
    assert expected.isnan().any(dim=0).nonzero().flatten().tolist() == [253, 254, 255]
    rtol = 2e-6 if (isa, operand) == ("avx2", "bfloat16") else 0
    torch.testing.assert_close(got, expected.repeat(2, 1)[: len(got)], rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_a_single_weight_is_infinite_where_float32_ends(tokens, operand, isa, decode):
    """Each code under each scale, the only weight of its row that is not zero, at a place of its own."""
    codes, powers = (grid.flatten() for grid in torch.meshgrid(torch.arange(16), torch.arange(256), indexing="ij"))
    column = torch.arange(len(codes)) * 37 % 160
    blocks = torch.zeros(1, len(codes), 80, dtype=torch.uint8)
    scales = torch.full((1, len(codes), 5), 127, dtype=torch.uint8)
    row = torch.arange(len(codes))
    blocks[0, row, column // 2] = (codes << 4 * (column % 2)).to(torch.uint8)
    scales[0, row, column // 32] = powers.to(torch.uint8)
    x = torch.ones(tokens, 160)
    got = ops.grouped_linear(x, blocks, scales, offsets_of(tokens), operand=operand, backend="cpu")
    weights = decode(blocks[0], scales[0]).float()
    expected = weights.sum(dim=1).masked_fill(powers == 255, torch.nan)
    assert expected.isinf().sum() == 2 * (2 + 4)  # of either sign 4 and 6 under byte 253; 2, 3, 4 and 6 under 254
    rtol = 2e-6 if (isa, operand) == ("avx2", "bfloat16") else 0
    torch.testing.assert_close(got, expected.expand(tokens, -1), rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_transposed_one_hot_rows_return_every_code_under_every_scale(tokens, operand, isa, decode):
    """An expert for each scale byte, whose first row has every code byte; the second one has zeros."""
    blocks = torch.stack([torch.arange(256), torch.zeros(256, dtype=torch.int64)]).byte().repeat(256, 1, 1)
    scales = torch.full((256, 2, 16), 127, dtype=torch.uint8)
    scales[:, 0] = torch.arange(256, dtype=torch.uint8)[:, None]
    factor = torch.arange(tokens).remainder(3).sub(1)  # tokens get -1, 0 and 1 times the row
    x = torch.stack([factor, torch.ones_like(factor)], dim=1).float().repeat(256, 1)
    got = ops.grouped_linear(
        x, blocks, scales, torch.arange(257) * tokens, transpose=True, operand=operand, backend="cpu"
    )
    expected = decode(blocks[:, 0], scales[:, 0]).float()[:, None] * factor[:, None].float()
    torch.testing.assert_close(got.view(256, tokens, 512), expected, rtol=0, atol=0, equal_nan=True)


@TRANSPOSED
@pytest.mark.parametrize("operand", ops.OPERANDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_reaches_no_other(value, operand, transpose, isa, random_packed):
    blocks, scales = random_packed(2, 41, 160)
    x = random_rows(23, 41 if transpose else 160, operand)
    offsets = offsets_of(9, 14)
    run = lambda x: ops.grouped_linear(  # noqa: E731
        x, blocks, scales, offsets, transpose=transpose, operand=operand, backend="cpu"
    )
    expected = run(x)
    for row, column in ((0, 0), (8, 31), (11, 37), (22, 40)):
        hit = x.clone()
        hit[row, column] = value
        got = run(hit)
        others = torch.arange(23) != row
        assert torch.equal(got[others], expected[others])
        assert not got[row].isfinite().all()


@TRANSPOSED
@pytest.mark.parametrize("tokens", [1, 2, 5, 23])
def test_what_bfloat16_does_not_hold_is_rounded_to_even_or_kept(tokens, transpose, isa, random_packed, decode):
    """Columns of ties among others: which of their neighbours is taken shows in the sum."""
    blocks, scales = random_packed(1, 41, 160)
    x = random_rows(tokens, 41 if transpose else 160, "float32")
    ties = torch.randint(-400, 400, x.shape, generator=torch.Generator().manual_seed(4)) * 2 + 1
    x[:, ::2] = (ties.float() / 512 + ties.sign())[:, ::2]  # 1 and 9 bits of fraction, the last of them set
    got = ops.grouped_linear(
        x, blocks, scales, offsets_of(tokens), transpose=transpose, operand="bfloat16", backend="cpu"
    )
    taken = x.bfloat16().float() if isa == "avx512_bf16" else x
    assert_summed(got, taken, decode(blocks, scales), [tokens], transpose, allowed(isa, "bfloat16", transpose))


def test_memory_around_every_tensor_is_left_alone(isa, random_packed, decode):
    """Outputs into the middle of a buffer; inputs at odd addresses, the bytes around them 0xFF, which is NaN."""

    def displaced(tensor, by):
        size = tensor.numel() * tensor.element_size()
        room = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        view = room[by : by + size]
        view.copy_(tensor.contiguous().view(torch.uint8).flatten())
        return view.view(tensor.dtype).view(tensor.shape)

    blocks, scales = random_packed(3, 9, 96)
    counts = [1, 8, 3]
    for operand in ops.OPERANDS:
        x = random_rows(sum(counts), 96, operand)
        inputs = displaced(x, 4), displaced(blocks, 1), displaced(scales, 3)
        got = ops.grouped_linear(*inputs, offsets_of(*counts), operand=operand, backend="cpu")
        taken = round_int8(x) if operand == "int8" else x
        assert_summed(got, taken, decode(blocks, scales), counts, False, allowed(isa, operand))


@TRANSPOSED
@pytest.mark.parametrize(("experts", "features", "width"), [(0, 5, 64), (2, 0, 64), (2, 5, 0)])
def test_empty_weights_give_zeros(experts, features, width, transpose, isa, random_packed):
    blocks, scales = random_packed(experts, features, width)
    x = torch.ones(3, features if transpose else width)
    offsets = torch.zeros(experts + 1, dtype=torch.int64)
    offsets[1:] = 3
    got = ops.grouped_linear(x, blocks, scales, offsets, transpose=transpose, backend="cpu")
    assert torch.equal(got, torch.zeros(3, width if transpose else features))


def test_offsets_that_do_not_fit_are_refused(isa, random_packed):
    blocks, scales = random_packed(2, 5, 64)
    for offsets in ([0, 3, 2], [-1, 1, 2], [0, 2, 9]):
        with pytest.raises(ValueError, match="do not divide 4 rows among experts"):
            ops.grouped_linear(torch.zeros(4, 64), blocks, scales, torch.tensor(offsets), backend="cpu")


@TRANSPOSED
def test_float64_rows_are_computed_in_float64(transpose, isa, random_packed, decode):
    blocks, scales = random_packed(2, 5, 96)
    x = torch.randn(4, 5 if transpose else 96, dtype=torch.float64)
    got = ops.grouped_linear(
        x, blocks, scales, offsets_of(1, 3), transpose=transpose, operand="bfloat16", backend="cpu"
    )
    by_row = decode(blocks, scales).repeat_interleave(torch.tensor([1, 3]), dim=0)
    torch.testing.assert_close(got, torch.einsum("snk,sn->sk" if transpose else "snk,sk->sn", by_row, x))


# experts_mlp


def sigmoid(v):
    return 1 / (1 + torch.exp(-v))


def gelu(v):
    return 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))


def gelu_tanh(v):
    return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


# What kernels are told, and the same in float64, of a gate and an up.
ACTIVATIONS = {
    "silu": (Activation(), lambda g, u: g * sigmoid(g) * u),
    "silu interleaved": (Activation(interleaved=True), lambda g, u: g * sigmoid(g) * u),
    "gelu": (Activation("gelu"), lambda g, u: gelu(g) * u),
    "gelu_tanh": (Activation("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    "gpt_oss": (
        Activation(interleaved=True, alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0),
        lambda g, u: g.clamp(max=7) * sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1),
    ),
    "clamped": (
        Activation(gate_max=5.0, up_max=4.0),
        lambda g, u: g.clamp(max=5) * sigmoid(g.clamp(max=5)) * u.clamp(-4, 4),
    ),
    "step3p7": (Activation(act_max=7.0, up_max=7.0), lambda g, u: (g * sigmoid(g)).clamp(max=7) * u.clamp(-7, 7)),
    "situ": (
        Activation(gate_cap=4.0, up_cap=25.0),
        lambda g, u: 4 * torch.tanh(g / 4) * sigmoid(g) * 25 * torch.tanh(u / 25),
    ),
    "relu gated": (Activation("relu"), lambda g, u: g.clamp(min=0) * u),
    "relu2 gated interleaved": (Activation("relu2", interleaved=True), lambda g, u: g.clamp(min=0) ** 2 * u),
    "relu2": (Activation("relu2", gated=False), lambda g, u: g.clamp(min=0) ** 2),
    "relu": (Activation("relu", gated=False), lambda g, u: g.clamp(min=0)),
    "silu ungated": (Activation(gated=False), lambda g, u: g * sigmoid(g)),
    "gelu ungated, cut": (Activation("gelu", gated=False, act_max=3.0), lambda g, u: gelu(g).clamp(max=3)),
}


class Layer:
    """A packed MLP of experts, and what it should give."""

    def __init__(self, name, random_packed, decode, experts=5, hidden=160, inner=96, bias=None):
        self.activation, self.exact_activation = ACTIVATIONS[name]
        self.experts, self.hidden = experts, hidden
        rows = 2 * inner if self.activation.gated else inner
        packed = random_packed(experts, rows, hidden, seed=1), random_packed(experts, hidden, inner, seed=2)
        self.decoded = [decode(*weights) for weights in packed]
        generator = torch.Generator().manual_seed(3)
        biases = [None, None]
        if bias is not None:
            biases = [torch.randn(experts, n, generator=generator).to(bias) for n in (rows, hidden)]
        self.first, self.second = (ops.Projection(*weights, b) for weights, b in zip(packed, biases, strict=True))

    def inputs(self, tokens, k=3, dtype=torch.float32, seed=0):
        """Tokens for which gates are about 3 in size, so that limits cut some; ids of all experts, some of none."""
        generator = torch.Generator().manual_seed(seed)
        size = 3 / self.decoded[0].square().mean().mul(self.hidden).sqrt()
        x = (torch.randn(tokens, self.hidden, generator=generator) * size).to(dtype)
        ids = torch.randint(-1, self.experts + 1, (tokens, k), generator=generator)
        return x, ids, torch.rand(tokens, k, generator=generator) - 1.5

    def run(self, x, ids, weights, operand=None):
        operand = operand or ops.operand_of(x.dtype)
        return ops.experts_mlp(x, ids, weights, self.first, self.second, self.activation, operand=operand)

    def exact(self, x, ids, weights, rounded=lambda v: v.double()):
        """In float64, token by token; `rounded` stands before each product."""
        out = torch.zeros(len(x), self.hidden, dtype=torch.float64)
        for t, j in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
            e = int(ids[t, j])
            if not 0 <= e < self.experts:
                continue
            outputs = self.decoded[0][e] @ rounded(x[t])
            if self.first.bias is not None:
                outputs = outputs + self.first.bias[e].double()
            half = len(outputs) // 2
            parts = outputs, outputs
            if self.activation.gated:
                parts = (outputs[::2], outputs[1::2]) if self.activation.interleaved else outputs.split(half)
            result = self.decoded[1][e] @ rounded(self.exact_activation(*parts))
            if self.second.bias is not None:
                result = result + self.second.bias[e].double()
            out[t] += weights[t, j].double() * result
        return out


@pytest.fixture
def layer(random_packed, decode):
    """layer(activation, E, H, I, bias dtype) -> Layer."""

    def layer(name="silu", **sizes):
        return Layer(name, random_packed, decode, **sizes)

    return layer


def relative(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_experts_mlp_of_every_activation(name, bias, dtype, isa, layer):
    made = layer(name, bias=bias)
    inputs = made.inputs(100, dtype=dtype)
    got = made.run(*inputs)
    assert got.dtype is dtype
    assert relative(got, made.exact(*inputs)) <= MIXED[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 6), (4, 2), (33, 3), (100, 2)])
@pytest.mark.parametrize(
    ("hidden", "inner"),
    [
        pytest.param(96, 32, id="less than a chunk"),
        pytest.param(128, 288, id="whole chunks into a tail"),
        pytest.param(544, 160, id="more columns than a piece of the second projection, a tail of one block each"),
    ],
)
@pytest.mark.parametrize("name", ["silu", "gpt_oss", "relu2"])
def test_experts_mlp_of_every_size(name, hidden, inner, tokens, k, dtype, isa, layer):
    """The limit is for thousands of numbers together: few tokens are run again with others."""
    made = layer(name, experts=4, hidden=hidden, inner=inner, bias=torch.float32)
    batches = [made.inputs(tokens, k, dtype, seed) for seed in range(-(-10000 // (tokens * hidden)))]
    got = torch.cat([made.run(*inputs) for inputs in batches])
    assert relative(got, torch.cat([made.exact(*inputs) for inputs in batches])) <= MIXED[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_right_by_itself(dtype, isa, layer):
    """A token that is wrong would be lost in the norm of many."""
    made = layer("gpt_oss", experts=3, hidden=256, bias=torch.bfloat16)
    inputs = made.inputs(70, 4, dtype)
    got, exact = made.run(*inputs).double(), made.exact(*inputs)
    off = (got - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
    assert (off <= 3 * MIXED[dtype]).all()


@pytest.mark.parametrize("name", ["silu", "gpt_oss", "relu2"])
def test_what_bfloat16_rounds_is_what_is_multiplied_and_no_more(name, isa, layer):
    """Float32 tokens that bfloat16 holds: what it has no room for is between the projections, if anything."""
    made = layer(name, hidden=544, inner=288)
    x, ids, weights = made.inputs(33)
    x = x.bfloat16().float()
    rounded = (lambda v: v.bfloat16().double()) if isa == "avx512_bf16" else lambda v: v.double()
    limit = {"avx512_bf16": 1e-4, "avx2": 1e-4}.get(isa, EXACT)
    assert relative(made.run(x, ids, weights, "bfloat16"), made.exact(x, ids, weights, rounded)) <= limit


@pytest.mark.parametrize("name", ["silu", "gpt_oss", "relu2"])
def test_experts_mlp_with_activations_of_8_bits(name, isa, layer):
    """Both projections round what they are given. A sum that rounds to the other side is one step of 127."""
    made = layer(name)
    inputs = made.inputs(33)
    got = made.run(*inputs, operand="int8")
    assert relative(got, made.exact(*inputs)) > 2e-3
    assert relative(got, made.exact(*inputs, rounded=lambda v: round_int8(v[None])[0].double())) <= 1e-3


@pytest.mark.parametrize("room", [1, 3 * 2 * 160 * 4 - 1, 3 * 2 * 160 * 4], ids=["one token", "two", "three"])
def test_tokens_beyond_the_room_are_run_after_the_others(room, isa, layer, monkeypatch):
    made = layer("gpt_oss", bias=torch.float32)
    inputs = made.inputs(10, 2)
    whole = made.run(*inputs)
    monkeypatch.setattr(cpu, "_ROOM", room)
    assert relative(made.run(*inputs), made.exact(*inputs)) <= EXACT
    assert relative(made.run(*inputs), whole.double()) <= EXACT


@pytest.mark.parametrize(
    "ids", [[[1, 1]], [[0, 0, 0, 0]], [[-1, -1]], [[5, -7]], [[2**40, -(2**62)]], [[4, 5, 0, -1, 4]]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routes(ids, dtype, isa, layer):
    """Repeated, of the last expert, and out of range by one, by more, and by more than 32 bits hold."""
    made = layer("gpt_oss", bias=torch.float32)
    ids = torch.tensor(ids).expand(40, -1)
    x, _, weights = made.inputs(40, ids.shape[1], dtype)
    got, exact = made.run(x, ids, weights), made.exact(x, ids, weights)
    if exact.any():
        assert relative(got, exact) <= MIXED[dtype]
    else:
        assert not got.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (3, 0), (0, 0)])
def test_no_token_and_no_choice(tokens, k, dtype, isa, layer):
    made = layer()
    got = made.run(*made.inputs(tokens, k, dtype))
    assert (got.dtype, got.shape) == (dtype, (tokens, 160))
    assert not got.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_are_not_contiguous_and_are_left_as_they_are(dtype, isa, layer):
    made = layer("silu", bias=dtype)
    inputs = made.inputs(9, 2, dtype)
    expected = made.run(*inputs)
    strided = [tensor.mT.contiguous().mT for tensor in inputs]
    assert not any(tensor.is_contiguous() for tensor in strided)
    before = [tensor.clone() for tensor in strided]
    got = made.run(*strided)
    assert got.is_contiguous()
    assert torch.equal(got, expected)
    assert all(torch.equal(tensor, was) for tensor, was in zip(strided, before, strict=True))
    every_second = torch.stack([inputs[0], torch.full_like(inputs[0], torch.nan)], dim=-1)[..., 0]
    assert torch.equal(made.run(every_second, *inputs[1:]), expected)
    made.first, made.second = (
        ops.Projection(*(part.mT.contiguous().mT if part.ndim == 3 else part.T.contiguous().T for part in projection))
        for projection in (made.first, made.second)
    )
    assert torch.equal(made.run(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_reaches_no_other(value, dtype, isa, layer):
    made = layer("gpt_oss")
    x, _, weights = made.inputs(20, 3, dtype)
    ids = torch.tensor([[0, 1, 2]]).expand(20, 3).contiguous()  # all tokens share experts, and so tiles
    expected = made.run(x, ids, weights)
    for token, column in ((0, 0), (7, 77), (19, 159)):
        hit = x.clone()
        hit[token, column] = value
        got = made.run(hit, ids, weights)
        others = torch.arange(20) != token
        assert torch.equal(got[others], expected[others])
        assert not got[token].isfinite().all()


def test_a_weight_at_a_sentinel_is_not_looked_at(isa, layer):
    made = layer("gpt_oss")
    x, ids, weights = made.inputs(9, 3)
    ids[:, 1] = torch.tensor([-1, 5, -100] * 3)
    expected = made.run(x, ids, weights)
    weights[:, 1] = torch.nan
    assert torch.equal(made.run(x, ids, weights), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_nan_gives_nan_to_the_tokens_of_its_expert_only(dtype, isa, layer):
    made = layer("silu")
    x, _, weights = made.inputs(6, 1, dtype)
    ids = torch.tensor([0, 1, 2, 0, 1, 2])[:, None]
    expected = made.run(x, ids, weights)
    made.second.scales[1, 17, 2] = 255
    got = made.run(x, ids, weights)
    wrong = torch.zeros_like(got, dtype=torch.bool)
    wrong[1::3, 17] = True
    assert torch.equal(got.isnan(), wrong)
    assert torch.equal(got[~wrong], expected[~wrong])


def test_gates_so_large_that_an_exponential_would_overflow(isa, layer):
    """Up to 1e12: act(gate) is the gate or 0, and never NaN."""
    for name in ("silu", "gelu", "gelu_tanh", "gpt_oss", "situ", "step3p7", "silu ungated"):
        made = layer(name)
        x, ids, weights = made.inputs(20)
        for factor in (1e2, 1e6, 1e12):
            assert relative(made.run(x * factor, ids, weights), made.exact(x * factor, ids, weights)) <= EXACT, name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_element_by_element(name, isa, decode):
    """One-hot weights make the kernel return its activation of any gate and up: over all sizes and around 0."""
    activation, exact_activation = ACTIVATIONS[name]
    gate = torch.cat([torch.linspace(-30, 30, 401), torch.logspace(-6, 0, 40), -torch.logspace(-6, 0, 40)])
    up = gate.flip(0) * 0.9 + 0.1
    rows = 64 if activation.gated else 32
    first = torch.zeros(1, rows, 16, dtype=torch.uint8)
    first[0, 0, 0] = 0x02  # weight 1 of column 0 for the gate
    if activation.gated:
        first[0, 1 if activation.interleaved else 32, 0] = 0x20  # of column 1 for the up
    second = torch.zeros(1, 32, 16, dtype=torch.uint8)
    second[0, 0, 0] = 0x02
    ones = torch.full((1, rows, 1), 127, dtype=torch.uint8)
    x = torch.zeros(len(gate), 32)
    x[:, 0], x[:, 1] = gate, up
    got = ops.experts_mlp(
        x,
        torch.zeros(len(x), 1, dtype=torch.int64),
        torch.ones(len(x), 1),
        ops.Projection(first, ones, None),
        ops.Projection(second, ones[:, :32], None),
        activation,
        operand="float32",
    )[:, 0]
    exact = exact_activation(gate.double(), up.double())
    size = (gate.double().abs() * (up.double().abs() + 1)).clamp(max=exact.abs().max())
    assert ((got.double() - exact).abs() <= 4e-7 * size + 1e-6 * exact.abs()).all()


def test_what_comes_out_is_rounded_to_bfloat16_as_torch_does(isa):
    """Experts that give 1, so that the routing weight is the output: ties, both ends, infinities and NaN."""
    ties = (torch.arange(2048) * 2 + 1).float() / 512 * 2.0 ** torch.randint(-60, 60, (2048,)).float()
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).int().view(torch.float32)
    ends = torch.tensor([0.0, 3.3895e38, 3.4e38, -3.4028e38, torch.inf, -torch.inf, torch.nan, 1.1754944e-38])
    weights = torch.cat([ties, -ties, bits, ends])[:, None]
    codes = torch.zeros(1, 32, 16, dtype=torch.uint8)
    codes[0, :, 0] = 0x02  # 1 in column 0 of every row
    projection = ops.Projection(codes, torch.full((1, 32, 1), 127, dtype=torch.uint8), None)
    x = torch.zeros(len(weights), 32, dtype=torch.bfloat16)
    x[:, 0] = 1
    ids = torch.zeros(len(weights), 1, dtype=torch.int64)
    relu = ACTIVATIONS["relu"][0]
    got = ops.experts_mlp(x, ids, weights, projection, projection, relu, operand="bfloat16")
    expected = weights.bfloat16().expand_as(got)
    rtol = 2**-8 if isa == "avx2" else 0  # whose 1 is 32767 steps of 1 / 32767
    torch.testing.assert_close(got, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": torch.zeros(4, 64, dtype=torch.float16)}, TypeError),
        ({"x": torch.zeros(4, 96)}, ValueError),
        ({"x": torch.zeros(64)}, ValueError),
        ({"ids": torch.zeros(4, 2, dtype=torch.int32)}, TypeError),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, ValueError),
        ({"weights": torch.zeros(4, 2, dtype=torch.bfloat16)}, TypeError),
        ({"weights": torch.zeros(4, 3)}, ValueError),
        ({"inner": 48}, ValueError),
        ({"hidden": 48, "x": torch.zeros(4, 48)}, ValueError),
        ({"rows": 65}, ValueError),
        ({"bias": torch.zeros(2, 32)}, ValueError),
        ({"bias": torch.zeros(2, 64, dtype=torch.float16)}, TypeError),
        ({"operand": "float16"}, ValueError),
        ({"activation": Activation("mish")}, ValueError),
    ],
)
def test_experts_mlp_refuses_what_does_not_fit(change, error):
    hidden, inner = change.get("hidden", 64), change.get("inner", 32)
    rows = change.get("rows", 2 * inner)

    def packed(n, width):
        return torch.zeros(2, n, width // 2, dtype=torch.uint8), torch.zeros(2, n, width // 32, dtype=torch.uint8)

    with pytest.raises(error):
        ops.experts_mlp(
            change.get("x", torch.zeros(4, 64)),
            change.get("ids", torch.zeros(4, 2, dtype=torch.int64)),
            change.get("weights", torch.zeros(4, 2)),
            ops.Projection(*packed(rows, hidden), change.get("bias")),
            ops.Projection(*packed(hidden, inner), None),
            change.get("activation", Activation()),
            operand=change.get("operand", "float32"),
        )


# Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["mse", "even", "floor", "rceil"])
@pytest.mark.parametrize("ties", ["even", "zero", "away"])
def test_quantizer_writes_the_bytes_of_the_one_in_torch(dtype, rule, ties, isa, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    powers = (
        torch.randint(-24, 16, (600, 1), generator=generator)
        if dtype is torch.float16
        else (torch.randint(-149, 127, (600, 1), generator=generator))
    )
    ordinary = torch.randn(600, 32, generator=generator) * 2.0**powers
    halves = torch.randint(-16, 17, (600, 32), generator=generator) / 4 * 2.0**powers  # many ties
    weight = torch.cat([ordinary, halves, torch.zeros(2, 32), -torch.zeros(1, 32)]).to(dtype)
    weight = weight[weight.isfinite().all(dim=1)].contiguous()
    got = cpu.quantize_chunk(weight, rule, ties)
    assert got is not None
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    expected = quantize(weight, rule, ties)
    assert torch.equal(got.scales, expected.scales.flatten())
    assert torch.equal(got.blocks, expected.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("threads", [1, 2])
def test_quantizer_sees_a_weight_that_is_not_finite_anywhere(dtype, value, threads, isa, request):
    if threads == 2:
        request.getfixturevalue("two_threads")
    weight = torch.ones(20000, 32, dtype=dtype)
    assert cpu.quantize_chunk(weight, "mse", "even") is not None
    for at in (0, 33, 262143, 262144, 639968, 639999):
        weight.view(-1)[at] = value
        assert cpu.quantize_chunk(weight, "mse", "even") is None
        weight.view(-1)[at] = 1


def test_probes_do_what_they_say(isa):
    data = torch.zeros((3 << 20) + 5, dtype=torch.uint8)
    assert cpu.probe_read(data) == 3 << 20
    once = cpu.probe_multiply(6400)
    assert once > 0
    assert cpu.probe_multiply(3 * 6400) == 3 * once


# Threads and processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_again_and_on_two_threads(dtype, isa, layer, two_threads):
    made = layer("gpt_oss", hidden=544, inner=288, bias=torch.float32)
    x = random_rows(100, 544, "bfloat16")
    inputs = made.inputs(100, 3, dtype)
    results = []
    for threads in (2, 2, 1, 2):
        torch.set_num_threads(threads)
        linear = [
            ops.grouped_linear(
                v,
                made.first.blocks,
                made.first.scales,
                offsets_of(0, 60, 1, 0, 39),
                operand=operand,
                backend="cpu",
                transpose=transpose,
            )
            for operand in ops.OPERANDS
            for v, transpose in ((x, False), (x.repeat(1, 2)[:, :576], True))
        ]
        results.append([made.run(*inputs), *linear])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_four_python_threads_at_once(isa, layer, two_threads):
    """Each with its own memory; who finds the kernels' threads taken works alone."""
    made = [layer(name, experts=4, hidden=160 + 32 * i) for i, name in enumerate(("silu", "gpt_oss", "relu2", "gelu"))]
    inputs = [one.inputs(50, 2, torch.bfloat16) for one in made]
    expected = [one.run(*given) for one, given in zip(made, inputs, strict=True)]

    def work(i):
        return all(torch.equal(made[i].run(*inputs[i]), expected[i]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [0, 1, 2, 3] * 2))


PRELUDE = """
import os, sys, warnings
import torch
from hf_mxfp4 import ops
from hf_mxfp4.activations import Activation
from hf_mxfp4.backends import cpu

warnings.simplefilter("ignore")
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
packed = lambda n, k: (torch.randint(256, (4, n, k // 2), dtype=torch.uint8, generator=generator),
                       torch.randint(120, 127, (4, n, k // 32), dtype=torch.uint8, generator=generator))
first, second = ops.Projection(*packed(256, 160), None), ops.Projection(*packed(160, 128), None)
x = torch.randn(64, 160, generator=generator).bfloat16()
ids = torch.randint(4, (64, 2), generator=generator)
weights = torch.rand(64, 2, generator=generator)
run = lambda: ops.experts_mlp(x, ids, weights, first, second, Activation(), operand="bfloat16")
big = torch.randn(500, 500)
expected = run()
assert torch.equal(run(), expected) and (big @ big).isfinite().all()  # torch's threads and the kernels' are there now
"""

FORKS = """
def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked(check):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 3)
    return ended(pid) == 0

def as_expected():
    return torch.equal(run(), expected)

print("a fork, whose threads are its own, as none came along", flush=True)
assert forked(lambda: as_expected() and torch.get_num_threads() == 2 and len(os.listdir("/proc/self/task")) >= 2)
assert as_expected()

print("forks of forks", flush=True)
assert forked(lambda: as_expected() and forked(lambda: as_expected() and forked(as_expected)))

print("threads of a forked process", flush=True)
from concurrent.futures import ThreadPoolExecutor

def in_threads():
    with ThreadPoolExecutor(4) as pool:
        return all(pool.map(lambda _: as_expected(), range(30)))

assert forked(in_threads)

print("a DataLoader's worker", flush=True)
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return run()

for got in torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=1, multiprocessing_context="fork"):
    assert torch.equal(got[0], expected)

print("forks while other threads call", flush=True)
import threading
stop, wrong = threading.Event(), []

def work():
    while not stop.is_set():
        if not as_expected():
            wrong.append(1)

workers = [threading.Thread(target=work) for _ in range(2)]
for worker in workers:
    worker.start()
good = all([forked(as_expected) for _ in range(25)])
stop.set()
for worker in workers:
    worker.join()
assert good and not wrong
"""

THREADS = """
print("a pool of four threads", flush=True)
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert all(pool.map(lambda _: torch.equal(run(), expected), range(40)))

print("more threads than cores", flush=True)
for threads in (1, 2, 5, 16, 3):
    torch.set_num_threads(threads)
    assert torch.equal(run(), expected)

print("many short calls", flush=True)
one = (x[:1], ids[:1], weights[:1], first, second, Activation())
alone = ops.experts_mlp(*one, operand="bfloat16")
for i in range(3000):
    torch.set_num_threads(1 + i % 3)
    assert torch.equal(ops.experts_mlp(*one, operand="bfloat16"), alone)
"""


@pytest.mark.parametrize("script", [pytest.param(FORKS, id="forks"), pytest.param(THREADS, id="threads")])
def test_processes_and_threads_beside_two_threads(script):
    """Right results and no waiting for threads that a fork left behind. The last line printed is where it stopped."""
    result = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


# The module, fused and not


@pytest.fixture
def module(stock_experts):
    """module(family, dtype, backend) -> MXFP4Experts with I = 96, H = 64."""

    def module(family="mixtral", dtype=torch.float32, **options):
        return MXFP4Experts.from_dense(stock_experts(family, dtype=dtype), **options).requires_grad_(False)

    return module


FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "nemotron_h latent", "muse_spark"]


def routes(tokens, dtype=torch.float32, experts=4):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, 2), generator=generator)
    return torch.randn(tokens, 64, generator=generator).to(dtype), ids, torch.rand(tokens, 2, generator=generator)


@pytest.fixture
def calls(monkeypatch):
    """The operands of calls of whole expert MLPs."""
    operands, original = [], cpu.experts_mlp

    def experts_mlp(*arguments):
        operands.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(cpu, "experts_mlp", experts_mlp)
    return operands


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_and_unfused_agree(family, dtype, isa, module, calls):
    """A gradient that is asked for keeps the module from running fused."""
    packed = module(family, dtype)
    hidden, ids, weights = routes(40, dtype)
    fused = packed(hidden, ids, weights)
    assert calls == ([] if family == "muse_spark" else ["bfloat16" if dtype is torch.bfloat16 else "float32"])
    calls.clear()
    unfused = packed(hidden.clone().requires_grad_(), ids, weights)
    assert not calls
    assert fused.dtype is unfused.dtype is dtype
    limit = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert relative(fused, unfused.detach().double()) <= limit


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_trained_parameters_do_not_keep_it_from_running_fused(mode, module, calls):
    packed = module("gpt_oss").requires_grad_(False)
    packed.gate_up_proj_bias.requires_grad_()
    arguments = routes(5)
    slow = packed(*arguments)
    assert (calls, slow.requires_grad) == ([], True)
    with mode():
        fast = packed(*arguments)
    assert calls == ["float32"]
    torch.testing.assert_close(fast, slow.detach())


def test_float64_tokens_are_computed_in_float64(module, calls):
    packed, reference = module("gpt_oss"), module("gpt_oss", backend="reference")
    arguments = routes(9, torch.float64)
    got = packed(*arguments)
    assert (got.dtype, calls) == (torch.float64, [])
    torch.testing.assert_close(got, reference(*arguments))


def test_activations_of_8_bits_where_they_are_asked_for(module, calls):
    """What is rounded to 8 bits differs from what is not, by little, in both forms of the module."""
    rounded, exact = module("mixtral", activation="int8"), module("mixtral")
    hidden, ids, weights = routes(40)
    fused = rounded(hidden, ids, weights)
    assert calls == ["int8"]
    off = relative(fused, exact(hidden, ids, weights).double())
    assert 2e-3 < off < 2e-2
    assert relative(fused, rounded(hidden.clone().requires_grad_(), ids, weights).detach().double()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "muse_spark"])
def test_gradients_agree_with_the_reference(family, dtype, isa, module):
    grads = []
    for backend in ("cpu", "reference"):
        packed = module(family, backend=backend).to(dtype)
        hidden, ids, weights = routes(30)
        trained = {"hidden": hidden.to(dtype).requires_grad_(), "weights": weights.to(dtype).requires_grad_()}
        trained |= {name: p.requires_grad_() for name, p in packed.named_parameters() if p.is_floating_point()}
        out = packed(trained["hidden"], ids, trained["weights"])
        grads.append(dict(zip(trained, torch.autograd.grad(out.square().sum(), trained.values()), strict=True)))
    assert ("down_proj_bias" in grads[0]) == (family == "gpt_oss")
    for name, grad in grads[0].items():
        assert relative(grad, grads[1][name].double()) <= (1e-12 if dtype is torch.float64 else 5e-6), name


def test_gradients_with_bfloat16_tokens_are_good_to_bfloat16(isa, module):
    grads = []
    for backend, dtype in (("cpu", torch.bfloat16), ("reference", torch.float64)):
        packed = module("gpt_oss", torch.bfloat16, backend=backend)
        hidden, ids, weights = routes(60, torch.bfloat16)
        hidden = hidden.to(dtype).requires_grad_()
        (packed(hidden, ids, weights).double() ** 2).sum().backward()
        grads.append(hidden.grad)
    assert relative(grads[0], grads[1]) <= 8e-3


def test_second_derivatives_agree_with_the_reference(isa, module):
    seconds = []
    for backend in ("cpu", "reference"):
        packed = module("gpt_oss", backend=backend)
        hidden, ids, weights = routes(8)
        hidden.requires_grad_()
        (first,) = torch.autograd.grad(packed(hidden, ids, weights).square().sum(), hidden, create_graph=True)
        seconds += torch.autograd.grad(first.square().sum(), hidden)
    assert seconds[1].abs().max() > 0
    assert relative(seconds[0], seconds[1].double()) <= 2e-5


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_forward_mode_derivatives_agree_with_the_reference(family, isa, module):
    """In both ways that torch has of asking for them; tangents of tokens, of routing weights, and of both."""
    values = []
    hidden, ids, weights = routes(8)
    tangents = torch.randn_like(hidden), torch.randn_like(weights)
    for backend in ("cpu", "reference"):
        packed = module(family, backend=backend)
        run = lambda h, w: packed(h, ids, w)  # noqa: B023, E731
        results = [*torch.func.jvp(run, (hidden, weights), tangents)]
        results += torch.func.jvp(lambda w: run(hidden, w), (weights,), tangents[1:])  # noqa: B023
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            dual = torch.autograd.forward_ad.make_dual(hidden, tangents[0])
            results += torch.autograd.forward_ad.unpack_dual(run(dual, weights))
        values.append([result.clone() for result in results])
    assert len(values[0]) == 6
    for got, expected in zip(*values, strict=True):
        assert expected.abs().max() > 0
        assert relative(got, expected.double()) <= 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype, module):
    packed = module("gpt_oss", dtype)
    arguments = routes(9, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = packed(*arguments)
    assert torch.equal(got, packed(*arguments))


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_experts_mlp_is_a_proper_op(tokens, dtype, bias, layer):
    made = layer("gpt_oss", bias=bias)
    activation = made.activation
    arguments = (*made.inputs(tokens, 2, dtype), *made.first, *made.second, activation.kind, activation.gated)
    arguments += (activation.interleaved, list(activation.constants), "bfloat16", False, "cpu")
    torch.library.opcheck(torch.ops.hf_mxfp4.experts_mlp.default, arguments)


@TRANSPOSED
@pytest.mark.parametrize("operand", ops.OPERANDS)
def test_grouped_linear_is_a_proper_op_on_this_backend(operand, transpose, random_packed):
    blocks, scales = random_packed(3, 5, 96)
    x = torch.randn(6, 5 if transpose else 96, requires_grad=True)
    arguments = (x, blocks, scales, offsets_of(2, 0, 3), transpose, operand, False, "cpu")
    torch.library.opcheck(torch.ops.hf_mxfp4.grouped_linear.default, arguments)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_compiles_as_one_graph(family, dtype, grad, module):
    """Also where no call came first that made choices."""
    packed = module(family, dtype)
    hidden, ids, weights = routes(9, dtype)
    hidden.requires_grad_(grad)
    torch._dynamo.reset()
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    got, expected = compiled(hidden, ids, weights), packed(hidden, ids, weights)
    assert torch.equal(got, expected)
    if grad:
        gradients = [torch.autograd.grad(out.float().square().sum(), hidden)[0] for out in (got, expected)]
        torch.testing.assert_close(*gradients)


def test_packed_bytes_on_meta_give_no_numbers(module):
    """Not from the whole MLP either: memory that nothing was written to would pass as numbers."""
    packed = module("mixtral")
    with pytest.raises(ValueError, match="on meta, where they have no values"):
        packed.to("meta")(*routes(5))

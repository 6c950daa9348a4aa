"""The Triton kernels, interpreted, against float64; their launch table; and what chooses them.

E experts, N output features, K input features, H hidden size, I intermediate size, T tokens, k experts a token. What
compilers make of the kernels is looked at in test_triton_code.py, what a GPU computes by benchmarks/gpu_check.py.
"""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4 import MXFP4Experts, configs, mxfp4_expert_linear, ops, packed_report
from hf_mxfp4.activations import Activation
from hf_mxfp4.backends import choose, triton, unavailable
from hf_mxfp4.backends.reference import Projection
from hf_mxfp4.bench import tune
from hf_mxfp4.cli import main

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")

GPT_OSS = Activation(interleaved=True, alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0)
ACTIVATIONS = {
    "silu": Activation(),
    "silu, interleaved": Activation(interleaved=True),
    "gpt-oss": GPT_OSS,
    "cut": Activation(act_max=1.5, gate_max=2.0),
    "soft caps": Activation(gate_cap=4.0, up_cap=25.0),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "relu2 without a gate": Activation("relu2", gated=False),
}
LIMITS = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}
"""Norm of the error over norm of the result: of float32 sums, or of a rounding on the way and one out."""


def has_dot_scaled():
    """Triton interprets `tl.dot_scaled` from 3.8 on."""
    import triton as package

    return tuple(map(int, package.__version__.split(".")[:2])) >= (3, 8)


ROUTES = [
    "planes",
    "rows",
    pytest.param("scaled", marks=pytest.mark.skipif(not has_dot_scaled(), reason="this Triton cannot interpret it")),
]
TILE = triton.Tile(64, 16, 128, 4, 1)


@pytest.fixture
def use(monkeypatch):
    """use(route, tile) -> from now on every batch goes that way."""

    def use(route, tile=TILE):
        config = triton.Config(route, tile, tile, tile)
        monkeypatch.setattr(triton, "find_config", lambda *arguments: config)

    return use


class Layer:
    """Random experts, and what they compute in float64."""

    def __init__(self, random_packed, decode, activation, experts, hidden, inner, bias=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = 2 * inner if activation.gated else inner
        self.activation, self.decode, self.projections = activation, decode, []
        for offset, features, width in ((0, rows, hidden), (1, hidden, inner)):
            blocks, scales = random_packed(experts, features, width, seed=seed + offset)
            own = None if bias is None else torch.randn(experts, features, generator=generator).to(bias)
            self.projections.append(Projection(blocks, scales, own))
        self.generator = generator

    def batch(self, tokens, top_k, dtype=torch.float32, strays=True):
        experts, _, half = self.projections[0].blocks.shape
        low, high = (-2, experts + 2) if strays else (0, experts)
        x = torch.randn(tokens, 2 * half, generator=self.generator).to(dtype)
        ids = torch.randint(low, high, (tokens, top_k), generator=self.generator)
        return x, ids, torch.rand(tokens, top_k, generator=self.generator)

    def run(self, x, ids, weights, narrow=True):
        return ops.experts_mlp(
            x, ids, weights, *self.projections, self.activation, operand="float32", narrow=narrow, backend="triton"
        )

    def exact(self, x, ids, weights):
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t, j in itertools.product(*map(range, ids.shape)):
            e = int(ids[t, j])
            if 0 <= e < self.projections[0].blocks.shape[0]:
                rows = x[t].double()[None]
                for projection in self.projections:
                    rows = rows @ self.decode(projection.blocks[e], projection.scales[e]).mT
                    rows = rows if projection.bias is None else rows + projection.bias[e].double()
                    rows = self.activation(rows) if projection is self.projections[0] else rows
                out[t] += weights[t, j].double() * rows[0]
        return out


@pytest.fixture
def layer(random_packed, decode):
    return lambda activation=GPT_OSS, experts=3, hidden=96, inner=64, **options: Layer(
        random_packed, decode, activation, experts, hidden, inner, **options
    )


def error(got, exact):
    assert got.isfinite().all()
    return float((got.double() - exact).norm() / exact.norm())


# Whole expert MLPs


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name, route, layer, use):
    use(route)
    made = layer(ACTIVATIONS[name], bias=torch.float32)
    batch = made.batch(5, 2)
    assert error(made.run(*batch), made.exact(*batch)) < LIMITS[torch.float32]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", LIMITS)
def test_every_dtype(dtype, bias, route, layer, use):
    use(route)
    made = layer(bias=bias)
    batch = made.batch(4, 2, dtype)
    got = made.run(*batch)
    assert got.dtype is dtype
    assert error(got, made.exact(*batch)) < LIMITS[dtype]


SHAPES = [
    pytest.param(1, 1, 1, 32, 32, id="one of everything, one group"),
    pytest.param(3, 1, 5, 160, 96, id="K and N past a tile, neither a multiple of one"),
    pytest.param(2, 40, 2, 64, 32, id="more slots of an expert than a tile has"),
    pytest.param(40, 3, 2, 32, 32, id="more experts than slots"),
    pytest.param(896, 2, 4, 32, 32, id="as many experts as any known model has"),
    pytest.param(2, 3, 7, 128, 128, id="an expert several times for a token, whole tiles"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("experts", "tokens", "top_k", "hidden", "inner"), SHAPES)
def test_every_shape(experts, tokens, top_k, hidden, inner, route, layer, use):
    use(route)
    made = layer(experts=experts, hidden=hidden, inner=inner)
    batch = made.batch(tokens, top_k, strays=False)
    assert error(made.run(*batch), made.exact(*batch)) < LIMITS[torch.float32]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5),
    st.sampled_from(list(ACTIVATIONS.values())), st.sampled_from(list(LIMITS)),
    st.sampled_from([None, torch.bfloat16]), st.booleans(),
    st.sampled_from([("planes", 16), ("planes", 64), ("rows", 16)]),
)  # fmt: skip
def test_drawn_shapes(random_packed, decode, experts, tokens, top_k, h, i, activation, dtype, bias, narrow, route):
    made = Layer(random_packed, decode, activation, experts, 32 * h, 32 * i, bias)
    batch = made.batch(tokens, top_k, dtype)
    tile = triton.Tile(64, route[1], 128, 4, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "find_config", lambda *arguments: triton.Config(route[0], tile, tile, tile))
        got = made.run(*batch, narrow=narrow)
    exact = made.exact(*batch)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=LIMITS[dtype] * max(1e-30, float(exact.norm())))


@pytest.mark.parametrize("route", ROUTES)
def test_ids_that_are_no_experts_contribute_nothing(route, layer, use):
    use(route)
    made = layer(bias=torch.float32)
    x, _, weights = made.batch(2, 3)
    ids = torch.tensor([[-1, 3, 2**40], [1, 3, -(2**40)]])
    got = made.run(x, ids, weights)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert error(got, made.exact(x, ids, weights)) < LIMITS[torch.float32]


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_tokens_and_no_experts_a_token(shape, layer):
    made = layer()
    x = torch.randn(shape[0], 96)
    got = made.run(x, torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
    assert torch.equal(got, torch.zeros_like(x))


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_bits_again(route, layer, use):
    use(route)
    made = layer()
    batch = made.batch(9, 2)
    assert torch.equal(made.run(*batch), made.run(*batch))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_finite_comes_out_of_its_token_alone(route, layer, use):
    use(route)
    made = layer()
    x, ids, weights = made.batch(3, 2, strays=False)
    expected = made.run(x, ids, weights)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    got = made.run(x, ids, weights)
    assert torch.equal(got[0], expected[0])
    assert got[1].isnan().all()
    assert not got[2].isfinite().all()


def test_more_slots_than_a_program_reads_at_a_time(layer, use, monkeypatch):
    use("planes")
    monkeypatch.setattr(triton, "_MOST_SLOTS", 16)
    made = layer()
    batch = made.batch(60, 2)
    assert error(made.run(*batch), made.exact(*batch)) < LIMITS[torch.float32]


def test_stacks_of_more_than_2_31_words(tmp_path, decode, random_packed, use):
    """The file has a hole where no expert is picked, so that it takes neither disk nor memory."""
    use("planes", triton.Tile(128, 16, 1024, 4, 1))
    experts, features, width = 16390, 256, 4096
    assert experts * features * width // 8 > 2**31
    shapes = ((experts, features, width // 2), (experts, features, width // 32))
    stacks = [
        torch.from_file(str(tmp_path / name), True, shape[0] * shape[1] * shape[2], dtype=torch.uint8).view(shape)
        for name, shape in zip(("blocks", "scales"), shapes, strict=True)
    ]
    own = random_packed(features, width)
    for stack, part in zip(stacks, own, strict=True):
        stack[-1] = part
    x = torch.randn(1, width)
    config = triton.Config("planes", *[triton.Tile(128, 16, 1024, 4, 1)] * 3)
    offsets = torch.zeros(experts + 1, dtype=torch.int64)
    offsets[-1] = 1
    launches, out = triton.linear_launches(
        x, *stacks, offsets, False, config, parts=3, narrow=True, multiply="interpreted"
    )
    permute, cut, product = launches
    permute.run()
    table = cut.arguments["table"]
    table.copy_(torch.tensor([[experts - 1], [0], [1]]))  # what the 16390 programs of `cut` would write
    product.run()
    assert error(out, x.double() @ decode(*own).mT) < LIMITS[torch.float32]


# grouped_linear: products of sorted rows, and the bits of weights


@pytest.mark.parametrize("operand", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose", [False, True])
def test_one_hot_rows_return_the_weights_exactly(transpose, operand, random_packed, decode, use):
    use("planes")
    blocks, scales = random_packed(2, 96, 160)
    width = 96 if transpose else 160
    eye = torch.eye(width).repeat(2, 1)
    offsets = torch.tensor([0, width, 2 * width])
    arguments = {"transpose": transpose, "operand": operand, "backend": "triton"}
    weights = decode(blocks, scales).float()
    for narrow in (False, True):
        got = ops.grouped_linear(eye, blocks, scales, offsets, narrow=narrow, **arguments)
        assert torch.equal(got.view(2, width, -1), weights if transpose else weights.mT)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_every_code_with_every_scale_byte(narrow, transpose, decode, use, assert_same_bits):
    """Row r of 16 for each scale byte has code r first and zeros after it, so that nothing meets an infinity."""
    use("planes")
    bytes = torch.arange(1, 129) if narrow else torch.arange(256)
    scales = bytes.to(torch.uint8).repeat_interleave(16)[:, None]
    blocks = torch.zeros(len(scales), 16, dtype=torch.uint8)
    blocks[:, 0] = torch.arange(16).repeat(len(bytes))
    expected = decode(blocks, scales)[:, 0].float()
    if transpose:
        blocks, scales = blocks[:, None], scales[:, None]  # an expert each: N is 1
        x, offsets = torch.ones(len(blocks), 1), torch.arange(len(blocks) + 1)
    else:
        blocks, scales = blocks[None], scales[None]
        x, offsets = torch.eye(1, 32), torch.tensor([0, 1])
    if transpose:
        keep = [*range(0, len(blocks), 37), len(blocks) - 1, len(blocks) - 16]
        blocks, scales, x, offsets, expected = (
            blocks[keep], scales[keep], x[keep], torch.arange(len(keep) + 1), expected[keep]
        )  # fmt: skip
    got = ops.grouped_linear(x, blocks, scales, offsets, transpose=transpose, narrow=narrow, backend="triton")
    got = got[:, 0] if transpose else got[0]
    sign = expected != 0  # a sum that starts from 0 has no -0
    assert_same_bits(torch.where(sign, got, got.abs()), torch.where(sign, expected, expected.abs()))


@pytest.mark.parametrize("route", ["rows", ROUTES[2]])
def test_every_scale_byte_on_the_other_routes(route, decode, use, assert_same_bits):
    """By the second projection of an MLP whose middle is 1 at one place: code and byte as above, in groups of rows."""
    use(route)
    bytes = torch.arange(1, 129) if route == "scaled" else torch.arange(256)
    scales = bytes.to(torch.uint8).repeat_interleave(16)
    blocks = torch.zeros(len(scales), 16, dtype=torch.uint8)
    blocks[:, 0] = torch.arange(16).repeat(len(bytes))
    rows = len(scales)
    zeros = torch.zeros(1, 32, rows // 2, dtype=torch.uint8), torch.ones(1, 32, rows // 32, dtype=torch.uint8)
    first = Projection(*zeros, torch.eye(1, 32))
    second = Projection(blocks[None], scales[None, :, None], None)
    relu = Activation("relu", gated=False)
    got = ops.experts_mlp(
        torch.zeros(1, rows), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), first, second, relu,
        operand="float32", narrow=route == "scaled", backend="triton",
    )[0]  # fmt: skip
    expected = decode(blocks, scales[:, None])[:, 0].float()
    sign = expected != 0
    assert_same_bits(torch.where(sign, got, got.abs()), torch.where(sign, expected, expected.abs()))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("operand", ops.OPERANDS)
def test_products_of_sorted_rows(operand, transpose, random_packed, use):
    use("planes")
    blocks, scales = random_packed(4, 40, 96)
    x = torch.randn(27, 40 if transpose else 96)
    offsets = torch.tensor([0, 2, 2, 20, 24])
    arguments = {"transpose": transpose, "operand": operand}
    got = ops.grouped_linear(x, blocks, scales, offsets, backend="triton", **arguments)
    exact = ops.grouped_linear(x.double(), blocks, scales, offsets, **arguments)
    assert torch.equal(got[24:], torch.zeros_like(got[24:]))
    assert error(got, exact) < (LIMITS[torch.bfloat16] if operand == "bfloat16" else LIMITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "nemotron_h"])
def test_gradients_of_a_module(family, dtype, stock_experts):
    stock = stock_experts(family)
    grads = {}
    for backend in ("triton", "reference"):
        packed = MXFP4Experts.from_dense(stock, backend=backend)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 64, generator=generator).to(dtype).requires_grad_()
        weights = torch.rand(6, 2, generator=generator).requires_grad_()
        out = packed(x, torch.randint(5, (6, 2), generator=generator), weights)
        out.backward(torch.randn(6, 64, generator=generator).to(dtype))
        grads[backend] = [out.detach(), x.grad, weights.grad]
    for got, expected in zip(*grads.values(), strict=True):
        assert error(got, expected.double()) < 2 * LIMITS[dtype]


def test_float64_is_computed_in_float64(random_packed, use):
    use("planes")
    blocks, scales = random_packed(2, 5, 64)
    arguments = torch.randn(3, 64, dtype=torch.float64), blocks, scales, torch.tensor([0, 2, 3])
    assert torch.equal(ops.grouped_linear(*arguments, backend="triton"), ops.grouped_linear(*arguments))


@pytest.mark.parametrize("transpose", [False, True])
def test_a_gpu_without_matrix_units_multiplies_sorted_rows_in_plain_torch(transpose, random_packed, monkeypatch):
    monkeypatch.setattr(triton, "family", lambda device: "sm_75")
    blocks, scales = random_packed(2, 32, 64)
    x = torch.randn(5, 32 if transpose else 64)
    arguments = x, blocks, scales, torch.tensor([0, 3, 5])
    got = ops.grouped_linear(*arguments, transpose=transpose, backend="triton")
    assert torch.equal(got, ops.grouped_linear(*arguments, transpose=transpose))


# Modules, compilers, and what is asked of a device


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "nemotron_h", "muse_spark"])
def test_a_module_runs_through_the_kernels(family, dtype, stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts(family), backend="triton")
    oracle = MXFP4Experts.from_dense(stock_experts(family), backend="reference")
    x, ids = torch.randn(5, 64).to(dtype), torch.randint(5, (5, 2))
    weights = torch.rand(5, 2, dtype=dtype)
    with torch.no_grad():
        assert error(packed(x, ids, weights), oracle(x.double(), ids, weights.double())) < LIMITS[dtype]
    assert packed_report(packed, check=True).rows[0].backend == "triton"


def test_8_bit_activations_run_as_two_products(stock_experts, monkeypatch):
    monkeypatch.setattr(triton, "experts_mlp", None)
    results = []
    for backend in ("triton", "reference"):
        packed = MXFP4Experts.from_dense(stock_experts("mixtral"), backend=backend, activation="int8")
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(packed(torch.randn(5, 64), torch.randint(4, (5, 2)), torch.rand(5, 2)))
    assert error(results[0], results[1].double()) < 1e-5


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_into_one_graph(grad, stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("gpt_oss"), backend="triton")
    arguments = torch.randn(4, 64, requires_grad=grad), torch.randint(4, (4, 2)), torch.rand(4, 2)
    expected = packed(*arguments)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), expected)


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_ops_are_proper_ops(dtype, layer, random_packed):
    made = layer(bias=dtype)
    activation = made.activation
    arguments = (*made.batch(3, 2, dtype), *made.projections[0], *made.projections[1], activation.kind, True)
    arguments += (True, list(activation.constants), "float32", True, "triton")
    torch.library.opcheck(torch.ops.hf_mxfp4.experts_mlp.default, arguments)
    x = torch.randn(5, 64, requires_grad=True)
    blocks, scales = random_packed(2, 32, 64)
    for arguments in ((x, False), (torch.randn(5, 32, requires_grad=True), True)):
        rows, transpose = arguments
        torch.library.opcheck(
            torch.ops.hf_mxfp4.grouped_linear.default,
            (rows, blocks, scales, torch.tensor([0, 2, 5]), transpose, "float32", True, "triton"),
        )


def test_launches_are_made_without_a_value_of_a_tensor(layer):
    """On meta tensors, which have none: so nothing waits for a device, and graphs can be captured."""
    made = layer(bias=torch.float32)
    move = lambda part: None if part is None else part.to("meta")  # noqa: E731
    first, second = (Projection(*map(move, projection)) for projection in made.projections)
    for route in ("planes", "rows", "scaled"):
        config = triton.Config(route, TILE, TILE, TILE)
        launches, out = triton.experts_launches(
            *map(move, made.batch(7, 2)), first, second, GPT_OSS, config, narrow=True, multiply="ptx"
        )
        assert len(launches) == 4
        assert out.shape == (7, 96)
    for transpose in (False, True):
        x, offsets = torch.empty(9, 192 // 2 if not transpose else 128, device="meta"), torch.empty(4, device="meta")
        launches, _ = triton.linear_launches(
            x, *first[:2], offsets, transpose, config, parts=1, narrow=True, multiply="ptx"
        )
        assert len(launches) == 3


def test_dense_route(layer, use):
    use("dense")
    made = layer(bias=torch.bfloat16)
    for dtype, limit in LIMITS.items():
        batch = made.batch(6, 2, dtype)
        assert error(made.run(*batch), made.exact(*batch)) < limit


def test_the_functional_form(random_packed, decode, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "triton")
    blocks, scales = random_packed(3, 40, 64)
    x, ids, weights = torch.randn(4, 64), torch.randint(3, (4, 2)), torch.rand(4, 2)
    got = mxfp4_expert_linear(x, blocks, scales, ids, weights, torch.zeros(4, 40))
    exact = torch.einsum("tk,tknh,th->tn", weights.double(), decode(blocks, scales)[ids], x.double())
    assert error(got, exact) < LIMITS[torch.float32]


# Scales that the quicker decode takes


def test_narrow_scales_are_found_once_and_again_after_a_change(stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="triton")
    assert packed.is_narrow()
    with torch.no_grad():
        for byte, narrow in ((0, False), (1, True), (128, True), (129, False), (255, False)):
            packed.down_proj_scales[0, 0, 0] = byte
            assert packed.is_narrow() is narrow
    state = MXFP4Experts.from_dense(stock_experts("mixtral")).state_dict()
    packed.load_state_dict(state)
    assert packed.is_narrow()
    packed.down_proj_scales = torch.nn.Parameter(state["down_proj_scales"].clone().fill_(200), requires_grad=False)
    assert not packed.is_narrow()


@pytest.mark.parametrize("byte", [0, 129, 255])
def test_a_module_with_any_scale_byte(byte, stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="triton")
    x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with torch.no_grad():
        packed(x, ids, weights)
        packed.down_proj_scales[0, 3] = byte
        got = packed(x, ids, weights)
        oracle = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="reference")
        oracle.load_state_dict(packed.state_dict())
        expected = oracle(x.double(), ids, weights.double())
    assert got[:, 3].isnan().all() == (byte == 255)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


# The launch table


@pytest.mark.parametrize("name", triton.launch_table())
def test_entries_of_the_launch_table(name):
    for entry in triton.launch_table()[name]:
        assert entry["route"] in triton.ROUTES
        assert entry.get("narrow") or entry["route"] != "scaled"
        assert entry["tokens_per_expert"] > 0
        for part in triton.Config._fields[1:]:
            tile = triton.Tile(**entry[part])
            assert all(size & (size - 1) == 0 for size in tile[:4])
            assert tile.block_rows >= 16
            assert tile.block_k >= 32
            assert tile.block_tokens >= 16 or entry["route"] in ("rows", "dense")
        if entry["route"] in ("planes", "scaled"):
            assert entry["first"]["block_tokens"] == entry["second"]["block_tokens"]
    for narrow, tokens in itertools.product((False, True), (0.01, 1, 10, 1000)):
        config = triton.find_config(name, narrow, tokens, 2880, 2880)
        tiled = triton.find_config(name, narrow, tokens, 2880, 2880, triton._TILED)
        assert (tiled is None) == (name == "sm_75")
        assert tiled is None or tiled.route in ("planes", "scaled")
        assert narrow or config.route != "scaled"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sm_90", "sm_90"), ("sm_87", "sm_86"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_70", "sm_75"),
        ("gfx90a", "gfx90a"), ("gfx941", "gfx90a"), ("gfx1102", "gfx1100"), ("gfx1200", "gfx1100"), ("xpu", "default"),
        ("interpreter", "interpreter"),
    ],
)  # fmt: skip
def test_a_family_without_entries_takes_the_nearest_older_ones(name, nearest):
    assert triton.nearest_family(name, list(triton.launch_table())) == nearest


def test_the_nearest_entry_is_taken(monkeypatch):
    tile = TILE._asdict()
    entry = {"route": "planes", "first": tile, "second": tile, "transposed": tile}
    shaped = {"hidden_size": 2048, "intermediate_size": 768}
    entries = [
        {**entry, "tokens_per_expert": 1},
        {**entry, "tokens_per_expert": 64, "route": "scaled", "narrow": True},
        {**entry, "tokens_per_expert": 1, "route": "rows", **shaped},
    ]
    monkeypatch.setattr(triton, "launch_table", lambda: {"sm_90": entries})
    triton.find_config.cache_clear()
    try:
        for narrow, tokens, sizes, route in (
            (True, 2, (2880, 2880), "planes"), (True, 30, (2880, 2880), "scaled"), (False, 30, (2880, 2880), "planes"),
            (True, 1, (2048, 768), "rows"), (True, 1, (2048, 1024), "rows"), (True, 1000, (2048, 768), "scaled"),
        ):  # fmt: skip
            assert triton.find_config("sm_90", narrow, tokens, *sizes).route == route
    finally:
        triton.find_config.cache_clear()


# What chooses them


def test_without_triton_plain_torch_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(triton.util, "find_spec", lambda name: None)
    assert unavailable("triton") == "Triton is not installed"
    assert choose("auto", "cuda") == ("reference", "plain torch on cuda: Triton is not installed")
    with pytest.raises(ValueError, match="backend is 'triton', but Triton is not installed"):
        choose("triton", "cuda")


def test_what_is_said_where_there_is_no_gpu():
    code = (
        "from hf_mxfp4.backends import unavailable, choose\n"
        "print(unavailable('triton')); print(unavailable('triton', 'cpu')); print(choose('auto', 'cuda').reason)"
    )
    command = [sys.executable, "-c", code]
    environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}

    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "torch finds no device of type cuda or xpu",
        "it is for tensors on cuda and xpu, and these are on cpu",
        "plain torch on cuda: torch finds no device of type cuda",
    ]


@pytest.mark.parametrize("version", ["3.3.1", "2.0.0"])
def test_a_triton_that_is_too_old_is_named(version, monkeypatch):
    import triton as package

    monkeypatch.setattr(package, "__version__", version)
    triton._kernels.cache_clear()
    try:
        assert unavailable("triton") == f"Triton {version} is too old; 3.4 or newer is needed"
    finally:
        monkeypatch.undo()
        triton._kernels.cache_clear()


def test_devices_that_differ_are_named(layer):
    made = layer()
    x, ids, weights = made.batch(2, 2)
    with pytest.raises(ValueError, match="tensors are on cpu and meta; expected one device"):
        ops._run_mlp(x, ids.to("meta"), weights, *made.projections, GPT_OSS, "float32", True, "triton")


# hf-mxfp4 tune


def test_tune_writes_an_entry_that_is_then_found(tmp_path, capsys, monkeypatch):
    table = tmp_path / "launch.json"
    table.write_text(json.dumps(triton.launch_table()))
    for _ in range(2):  # the second time in the place of the first
        command = ["tune", "--shapes", "tiny", "--tokens", "2", "--device", "cpu", "--most", "5", "--quiet"]
        assert main([*command, "--table", str(table)]) == 0
    assert "interpreter, tiny, 2 tokens: " in capsys.readouterr().out
    tuned = json.loads(table.read_text())
    others = {name: entries for name, entries in tuned.items() if name != "interpreter"}
    assert others == {name: e for name, e in triton.launch_table().items() if name != "interpreter"}
    *old, entry = tuned["interpreter"]
    assert old == triton.launch_table()["interpreter"]
    monkeypatch.setattr(triton, "launch_table", lambda: tuned)
    triton.find_config.cache_clear()
    try:
        found = triton.find_config("interpreter", True, 0.5, 64, 64)
    finally:
        triton.find_config.cache_clear()
    assert (found.route, found.first._asdict()) == (entry["route"], entry["first"])
    assert list(tmp_path.iterdir()) == [table]


def test_tune_keeps_nothing_that_is_wrong(monkeypatch):
    tiles = [("planes", TILE)]
    monkeypatch.setattr(tune, "_expected", lambda layer: layer.x.double())
    with pytest.raises(RuntimeError, match="no configuration for 2 tokens ran and was right on cpu"):
        tune.tune(configs.shape("tiny"), 2, torch.device("cpu"), tiles, lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "nothing can be tuned on meta: it is for tensors on cpu and cuda and xpu"),
        (["--device", "cpu", "--tokens", "0"], "--tokens and --most are at least 1"),
        (["--device", "cpu", "--shapes", "gpt-5"], "shapes.json has no 'gpt-5'"),
    ],
)  # fmt: skip
def test_tune_refuses_what_it_cannot_do(arguments, message, capsys):
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err

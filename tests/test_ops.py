"""grouped_linear and mxfp4_expert_linear against loops in float64 over weights decoded by ml_dtypes.

E experts, N output features, K input features, T tokens, k experts a token, S rows sorted by expert.
"""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from hf_mxfp4 import mxfp4_expert_linear, ops
from hf_mxfp4.backends import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ARGUMENTS = (
    "latent_tokens",
    "packed_weights",
    "scale_bytes",
    "selected_experts",
    "mixture_weights",
    "shared_output",
)


@pytest.fixture
def routed(random_packed):
    """routed(T, k, E, N, K) -> the arguments of mxfp4_expert_linear by name, all experts equally likely."""

    def routed(tokens=5, k=2, experts=4, features=6, width=64, dtype=torch.float32):
        generator = torch.Generator().manual_seed(tokens + k + experts + features + width)
        blocks, scales = random_packed(experts, features, width)
        return {
            "latent_tokens": torch.randn(tokens, width, generator=generator).to(dtype),
            "packed_weights": blocks,
            "scale_bytes": scales,
            "selected_experts": torch.randint(experts, (tokens, k), generator=generator),
            "mixture_weights": torch.rand(tokens, k, generator=generator).to(dtype),
            "shared_output": torch.randn(tokens, features, generator=generator).to(dtype),
        }

    return routed


@pytest.fixture
def mixture(decode):
    """mixture(arguments) -> the exact result in float64, and the sum of the magnitudes of all its terms."""

    def mixture(arguments):
        x, blocks, scales, ids, weights, shared = (arguments[name] for name in ARGUMENTS)
        w = decode(blocks.flatten(2) if blocks.ndim == 4 else blocks, scales)
        exact, magnitude = shared.double(), shared.double().abs()
        for t in range(ids.shape[0]):
            for j, e in enumerate(ids[t].tolist()):
                if 0 <= e < w.shape[0]:
                    exact[t] += weights[t, j].double() * (w[e] @ x[t].double())
                    magnitude[t] += weights[t, j].double().abs() * (w[e].abs() @ x[t].double().abs())
        return exact, magnitude

    return mixture


@pytest.fixture
def decodes(monkeypatch):
    """What the reference backend decodes: for each call the bytes, and a weak reference to the result's memory."""
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    calls = []
    original = reference.dequantize_into

    def dequantize_into(blocks, scales, out, index):
        calls.append((blocks.clone(), StorageWeakRef(out.untyped_storage())))
        return original(blocks, scales, out, index)

    monkeypatch.setattr(reference, "dequantize_into", dequantize_into)
    return calls


def offsets_of(*counts):
    return torch.tensor([0, *counts]).cumsum(0)


# grouped_linear


@pytest.mark.parametrize(
    ("counts", "features", "width", "nobodys"),
    [
        pytest.param([2, 0, 3], 5, 96, 0, id="an expert without rows, K of three blocks"),
        pytest.param([1, 2], 4, 32, 3, id="three rows that are nobody's"),
        pytest.param([0, 0], 3, 64, 2, id="only rows that are nobody's"),
        pytest.param([0, 0], 3, 64, 0, id="no rows"),
        *[pytest.param([1, 2], n, 32, 0, id=f"N = {n}, less than a tile") for n in range(1, 10)],
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_grouped_linear_multiplies_each_experts_rows(
    counts, features, width, nobodys, transpose, random_packed, decode
):
    blocks, scales = random_packed(len(counts), features, width)
    rows = sum(counts)
    x = torch.randn(rows + nobodys, features if transpose else width, dtype=torch.float64)
    w = decode(blocks, scales)
    by_row = w.repeat_interleave(torch.tensor(counts), dim=0)
    expected = torch.einsum("snk,sn->sk" if transpose else "snk,sk->sn", by_row, x[:rows])
    got = ops.grouped_linear(x, blocks, scales, offsets_of(*counts), transpose=transpose)
    torch.testing.assert_close(got[:rows], expected)
    assert torch.equal(got[rows:], torch.zeros_like(got[rows:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_rows_return_the_weights_exactly(dtype, random_packed, decode):
    blocks, scales = random_packed(2, 5, 96)
    eye = torch.eye(96, dtype=dtype).repeat(2, 1)
    got = ops.grouped_linear(eye, blocks, scales, offsets_of(96, 96))
    assert torch.equal(got.view(2, 96, 5), decode(blocks, scales).mT.to(dtype))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("counts", "rows"),
    [([2, 0, 3], 5), ([1, 1, 0], 4), ([0, 0, 0], 0)],
    ids=["an expert without rows", "sentinels", "no rows"],
)
def test_fake_and_real_op_agree_and_the_derivative_is_registered(counts, rows, transpose, random_packed):
    blocks, scales = random_packed(3, 5, 96)  # K of three blocks, N odd
    x = torch.randn(rows, 5 if transpose else 96, requires_grad=True)
    arguments = (x, blocks, scales, offsets_of(*counts), transpose, "float32", False, "reference")
    torch.library.opcheck(torch.ops.hf_mxfp4.grouped_linear.default, arguments)


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_of_first_and_second_order(transpose, random_packed):
    blocks, scales = random_packed(3, 4, 32)
    x = torch.randn(6, 4 if transpose else 32, dtype=torch.float64, requires_grad=True)  # one row is nobody's
    arguments = (blocks, scales, offsets_of(2, 0, 3))
    assert torch.autograd.gradcheck(lambda x: ops.grouped_linear(x, *arguments, transpose=transpose), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.grouped_linear(x, *arguments, transpose=transpose), (x,))


def test_memory_behind_every_tail_is_not_read(random_packed):
    """K of three blocks and N of five rows, each tensor a corner of a buffer filled with 0xFF, which is NaN."""
    blocks, scales = random_packed(2, 5, 96)
    x = torch.randn(4, 96)
    expected = ops.grouped_linear(x, blocks, scales, offsets_of(1, 3))

    def cornered(tensor):
        buffer = tensor.new_empty([size + 32 for size in tensor.shape])
        buffer.view(torch.uint8).fill_(0xFF)
        corner = buffer[tuple(slice(size) for size in tensor.shape)]
        corner.copy_(tensor)
        return corner

    views = [cornered(tensor) for tensor in (x, blocks, scales)]
    assert not any(view.is_contiguous() for view in views)
    torch.testing.assert_close(ops.grouped_linear(*views, offsets_of(1, 3)), expected)


def test_a_nan_row_stays_one_row(random_packed):
    blocks, scales = random_packed(2, 5, 64)
    x = torch.randn(6, 64)
    x[2] = torch.nan
    got = ops.grouped_linear(x, blocks, scales, offsets_of(4, 2))
    assert torch.equal(got.isnan(), torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None].expand(6, 5))


@pytest.mark.parametrize("device", ["cpu", "meta"], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 64).half()}, TypeError, r"x has dtype torch\.float16.*float32 or float64"),
        ({"x": torch.zeros(4, 96)}, ValueError, r"x \[4, 96\].*blocks \[2, 5, 32\].*\[S, 64\]"),
        ({"x": torch.zeros(64)}, ValueError, r"x \[64\].*\[S, 64\]"),
        ({"transpose": True}, ValueError, r"x \[4, 64\].*\[S, 5\]"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, TypeError, r"offsets have dtype torch\.int32.*int64"),
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, ValueError, r"offsets \[4\].*2 experts.*\[E \+ 1\]"),
        ({"blocks": torch.zeros(2, 5, 32)}, TypeError, r"blocks have dtype torch\.float32.*uint8"),
        ({"scales": torch.zeros(2, 5, 2)}, TypeError, r"scales have dtype torch\.float32.*uint8"),
        ({"scales": torch.zeros(2, 5, 1, dtype=torch.uint8)}, ValueError, r"scales \[2, 5, 1\].*blocks \[2, 5, 32\]"),
        ({"scales": torch.zeros(2, 4, 2, dtype=torch.uint8)}, ValueError, r"scales \[2, 4, 2\].*blocks \[2, 5, 32\]"),
        ({"backend": "cuda"}, ValueError, r"'cuda'.*reference"),
        ({"operand": "float16"}, ValueError, r"'float16'.*float32, bfloat16, int8"),
    ],
)
def test_grouped_linear_refuses_what_does_not_fit(change, error, message, device, random_packed):
    blocks, scales = random_packed(2, 5, 64)
    arguments = {"x": torch.zeros(4, 64), "blocks": blocks, "scales": scales, "offsets": offsets_of(1, 3)} | change
    arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    with pytest.raises(error, match=message):
        ops.grouped_linear(**arguments)


# mxfp4_expert_linear: the numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_linear_sums_in_float32_and_casts_once(dtype, routed, mixture, assert_rounded_once):
    arguments = routed(tokens=33, k=4, features=96, width=160, dtype=dtype)
    got = mxfp4_expert_linear(**arguments)
    assert got.dtype is dtype
    assert_rounded_once(got, *mixture(arguments))


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 63, 64, 65, 127, 129, 257])  # around the edges of tiles of 8, 64, 128
def test_token_counts_around_tile_edges(tokens, routed, mixture, assert_rounded_once):
    arguments = routed(tokens=tokens)
    assert_rounded_once(mxfp4_expert_linear(**arguments), *mixture(arguments))


@pytest.mark.parametrize("experts", [1, 3, 5, 33, 128, 656, 896])  # 896: Kimi K3
def test_expert_counts_that_no_tile_divides(experts, routed, mixture, assert_rounded_once):
    arguments = routed(tokens=9, experts=experts, width=32)
    assert_rounded_once(mxfp4_expert_linear(**arguments), *mixture(arguments))


@pytest.mark.parametrize(
    ("features", "width"),
    [(32, 32), (64, 96), (96, 160), (160, 64), (2880, 32), (32, 2880)],  # 2880 = 90 * 32, gpt-oss
)
def test_widths_that_no_tile_divides(features, width, routed, mixture, assert_rounded_once):
    arguments = routed(tokens=3, experts=2, features=features, width=width)
    assert_rounded_once(mxfp4_expert_linear(**arguments), *mixture(arguments))


@pytest.mark.parametrize("features", range(1, 10))
def test_fewer_features_than_a_tile(features, routed, mixture, assert_rounded_once):
    arguments = routed(features=features, width=32)
    assert_rounded_once(mxfp4_expert_linear(**arguments), *mixture(arguments))


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        pytest.param([[1, 1]], [[0.3, 0.7]], id="an expert twice"),
        pytest.param([[0, 1, 2, 1, 0]], [[0.1, 0.2, 0.3, 0.4, 0.5]], id="k above E"),
        pytest.param([[0, 1], [2, 0]], [[3.0, 5.0], [-2.0, 0.0]], id="weights that sum to anything are not normalised"),
        pytest.param([[0, 0], [0, 0], [0, 0]], [[0.5, 0.5]] * 3, id="all tokens on expert 0"),
        pytest.param([[-1, 1], [3, 2], [-7, 99]], [[0.5, 0.5]] * 3, id="sentinels -1, E and far beyond"),
        pytest.param([[-1, 3]], [[0.5, 0.5]], id="only sentinels"),
    ],
)
def test_routes(ids, weights, routed, mixture, assert_rounded_once):
    arguments = routed(tokens=len(ids), k=len(ids[0]), experts=3)
    arguments |= {"selected_experts": torch.tensor(ids), "mixture_weights": torch.tensor(weights)}
    assert_rounded_once(mxfp4_expert_linear(**arguments), *mixture(arguments))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda a: {"packed_weights": a["packed_weights"].unflatten(-1, (-1, 16))}, id="blocks of 16 bytes"
        ),
        pytest.param(lambda a: {"scale_bytes": a["scale_bytes"].view(torch.float8_e8m0fnu)}, id="E8M0 scales"),
        pytest.param(lambda a: {"selected_experts": a["selected_experts"].int()}, id="int32 ids"),
        pytest.param(lambda a: {name: t.mT.contiguous().mT for name, t in a.items()}, id="nothing contiguous"),
        pytest.param(lambda a: {"mixture_weights": a["mixture_weights"].double()}, id="wider weights"),
    ],
)
def test_the_same_arguments_in_another_form_give_the_same_result(change, routed):
    arguments = routed()
    assert torch.equal(mxfp4_expert_linear(**arguments | change(arguments)), mxfp4_expert_linear(**arguments))


def test_weights_and_shared_output_may_be_of_another_dtype(routed, mixture, assert_rounded_once):
    arguments = routed(dtype=torch.bfloat16)
    arguments |= {name: arguments[name].float() / 3 for name in ("mixture_weights", "shared_output")}
    got = mxfp4_expert_linear(**arguments)
    assert got.dtype is torch.bfloat16
    assert_rounded_once(got, *mixture(arguments))


def test_a_nan_token_or_route_reaches_its_own_row_only(routed):
    arguments = routed(tokens=6, k=2, experts=2)
    arguments["selected_experts"][4, 1] = -1
    expected = mxfp4_expert_linear(**arguments)
    arguments["latent_tokens"][2] = torch.nan  # one token
    arguments["mixture_weights"][4, 1] = torch.nan  # at a sentinel: contributes nothing
    arguments["shared_output"][5, 0] = torch.nan
    got = mxfp4_expert_linear(**arguments)
    expected[2], expected[5, 0] = torch.nan, torch.nan
    assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))


# mxfp4_expert_linear: what it reads, keeps and leaves alone


@pytest.mark.parametrize("rows", [64, 1], ids=["an expert at a time", "a row at a time"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_only_selected_experts_are_decoded_each_once_and_dropped(grad, rows, routed, decodes, monkeypatch):
    arguments = routed(tokens=40, k=3, experts=9)
    ids = torch.tensor([7, 2, 4, -1, 9])[torch.arange(120).view(40, 3) % 5]
    arguments |= {"selected_experts": ids, "latent_tokens": arguments["latent_tokens"].requires_grad_(grad)}
    blocks = arguments["packed_weights"]
    row_bytes = 2 * blocks[0, 0].numel() * 4
    monkeypatch.setattr(reference, "_DECODED_BYTES", rows * row_bytes)
    mxfp4_expert_linear(**arguments)
    assert torch.equal(torch.cat([decoded for decoded, _ in decodes]), torch.cat([blocks[e] for e in (2, 4, 7)]))
    assert all(decoded.shape[0] <= rows for decoded, _ in decodes)
    assert all(memory.expired() for _, memory in decodes)


def test_decoded_weights_are_in_one_place_only(routed, decodes, monkeypatch):
    places, counted = set(), reference.dequantize_into

    def dequantize_into(blocks, scales, out, index):
        places.add(out.untyped_storage().data_ptr())
        return counted(blocks, scales, out, index)

    monkeypatch.setattr(reference, "dequantize_into", dequantize_into)
    mxfp4_expert_linear(**routed(tokens=40, k=3, experts=9))
    assert len(decodes) == 9
    assert len(places) == 1


def test_nothing_is_decoded_where_nothing_is_selected(routed, decodes):
    arguments = routed()
    arguments["selected_experts"].fill_(-1)
    mxfp4_expert_linear(**arguments)
    assert not decodes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "k", "sentinel"),
    [(5, 2, False), (0, 2, False), (5, 0, False), (5, 2, True)],
    ids=["routes", "no token", "no choice", "only sentinels"],
)
def test_inputs_stay_as_they_are_and_the_result_has_memory_of_its_own(tokens, k, sentinel, dtype, routed):
    arguments = routed(tokens=tokens, k=k, dtype=dtype)
    if sentinel:
        arguments["selected_experts"].fill_(-1)
    before = copy.deepcopy(arguments)
    got = mxfp4_expert_linear(**arguments)
    assert (got.shape, got.dtype) == (arguments["shared_output"].shape, dtype)
    if not k or sentinel:
        assert torch.equal(got, arguments["shared_output"])
    got.fill_(7)
    for name in ARGUMENTS:
        assert torch.equal(arguments[name], before[name]), name
    mine = got.untyped_storage().data_ptr()
    assert not mine or mine not in [t.untyped_storage().data_ptr() for t in arguments.values()]


def test_gradients_reach_tokens_weights_and_shared_output(routed, decode):
    arguments = routed(dtype=torch.float64)
    arguments["selected_experts"][0] = torch.tensor([1, 1])
    arguments["selected_experts"][1, 0] = -1
    trained = {name: arguments[name].requires_grad_() for name in ARGUMENTS if arguments[name].is_floating_point()}
    assert len(trained) == 3

    def run(*tensors):
        return mxfp4_expert_linear(**arguments | dict(zip(trained, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(trained.values()))
    assert torch.autograd.gradgradcheck(run, tuple(trained.values()))


def test_no_token_has_gradients_too(routed):
    arguments = routed(tokens=0)
    x = arguments["latent_tokens"].requires_grad_()
    mxfp4_expert_linear(**arguments).sum().backward()
    assert x.grad.shape == x.shape


def test_a_gradient_at_a_sentinel_is_zero(routed):
    arguments = routed()
    arguments["selected_experts"][:, 1] = -1
    arguments["mixture_weights"][:, 1] = torch.nan
    trained = [arguments[name].requires_grad_() for name in ("latent_tokens", "mixture_weights")]
    mxfp4_expert_linear(**arguments).sum().backward()
    assert trained[0].grad.isfinite().all()
    assert not trained[1].grad[:, 1].any()
    assert trained[1].grad[:, 0].all()


class Elsewhere(torch.Tensor):
    """Bytes on another device (meta, for want of one). Only views and moves work; moves are recorded."""

    VIEWS = ("select", "slice", "view", "detach", "alias")

    @staticmethod
    def __new__(cls, held, moved):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device="meta"
        )
        self.held, self.moved = held, moved
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.hf_mxfp4.grouped_linear.default:
            return ops._grouped_linear(*args)
        tensor, name = args[0], func.overloadpacket.__name__
        result = func(tensor.held, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
        if kwargs.get("device") == torch.device("cpu"):
            tensor.moved.append(result)
            return result
        assert name in cls.VIEWS, f"{name} of {list(tensor.shape)} before it was moved"
        return cls(result, tensor.moved)


def test_of_packed_bytes_on_another_device_only_selected_experts_move(routed, monkeypatch):
    """Nobody asked for a backend: the native kernels, which need all bytes beside the tokens, step back."""
    arguments = routed(experts=7)
    arguments["selected_experts"] = torch.tensor([[5, 2], [2, 2], [-1, 5], [7, 2], [5, 5]])
    with monkeypatch.context() as patch:
        patch.setenv("HF_MXFP4_BACKEND", "reference")
        expected = mxfp4_expert_linear(**arguments)
    x = arguments["latent_tokens"].requires_grad_()
    packed = [arguments[name] for name in ("packed_weights", "scale_bytes")]
    moved = []
    arguments |= {"packed_weights": Elsewhere(packed[0], moved), "scale_bytes": Elsewhere(packed[1], moved)}
    got = mxfp4_expert_linear(**arguments)
    wanted = [stack[e] for e in (2, 5) for stack in packed]
    assert torch.equal(got, expected)
    assert got.device == x.device
    assert [part.tolist() for part in moved] == [part.tolist() for part in wanted]
    got.sum().backward()
    assert [part.tolist() for part in moved] == [part.tolist() for part in wanted * 2]


# mxfp4_expert_linear: what it refuses to take


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("latent_tokens", torch.zeros(5, 64).int(), TypeError, r"torch\.int32.*floating point"),
        ("latent_tokens", torch.zeros(5, 96), ValueError, r"\[5, 96\].*width 64"),
        ("latent_tokens", torch.zeros(1, 5, 64), ValueError, r"\[1, 5, 64\].*\[T, K\]"),
        ("packed_weights", torch.zeros(4, 6, 32), TypeError, r"torch\.float32.*uint8"),
        ("packed_weights", torch.zeros(4, 6, 16, dtype=torch.uint8), ValueError, r"\[4, 6, 16\].*\[4, 6, 2\]"),
        ("packed_weights", torch.zeros(4, 6, 2, 8, dtype=torch.uint8), ValueError, r"\[4, 6, 2, 8\].*\[4, 6, 2\]"),
        ("scale_bytes", torch.zeros(4, 6, 2), TypeError, r"torch\.float32.*uint8"),
        ("scale_bytes", torch.zeros(4, 6, 3, dtype=torch.uint8), ValueError, r"\[4, 6, 32\].*\[4, 6, 3\]"),
        ("scale_bytes", torch.zeros(3, 6, 2, dtype=torch.uint8), ValueError, r"\[4, 6, 32\].*\[3, 6, 2\]"),
        ("selected_experts", torch.zeros(5, 2), TypeError, r"torch\.float32.*integer"),
        ("selected_experts", torch.zeros(5, 2, dtype=torch.bool), TypeError, r"torch\.bool.*integer"),
        ("selected_experts", torch.zeros(4, 2, dtype=torch.int64), ValueError, r"\[4, 2\].*5 .*\[T, k\]"),
        ("selected_experts", torch.zeros(5, dtype=torch.int64), ValueError, r"\[5\].*\[T, k\]"),
        ("mixture_weights", torch.zeros(5, 2, dtype=torch.int64), TypeError, r"torch\.int64.*floating point"),
        ("mixture_weights", torch.zeros(5, 3), ValueError, r"\[5, 3\].*\[5, 2\]"),
        ("shared_output", torch.zeros(5, 6).int(), TypeError, r"torch\.int32.*floating point"),
        ("shared_output", torch.zeros(5, 64), ValueError, r"\[5, 64\].*\[5, 6\]"),
        ("shared_output", torch.zeros(6), ValueError, r"\[6\].*\[5, 6\]"),
    ],
)
def test_expert_linear_refuses_what_does_not_fit(name, wrong, error, message, routed):
    """Nothing broadcasts; the message has what was got and what fits."""
    with pytest.raises(error, match=message):
        mxfp4_expert_linear(**routed() | {name: wrong})


def test_packed_weights_of_one_expert_are_refused(routed):
    arguments = routed()
    arguments |= {name: arguments[name][0] for name in ("packed_weights", "scale_bytes")}
    with pytest.raises(ValueError, match=r"packed_weights \[6, 32\].*\[E, N, K/2\]"):
        mxfp4_expert_linear(**arguments)


def test_forward_mode_derivatives_agree_with_backward_mode_ones(routed):
    arguments = routed(tokens=5, k=2, dtype=torch.float64)
    tokens = arguments.pop("latent_tokens")
    tangent = torch.randn_like(tokens)

    def linear(x):
        return mxfp4_expert_linear(x, **arguments)

    value, got = torch.func.jvp(linear, (tokens,), (tangent,))
    assert torch.equal(value, linear(tokens))
    expected = torch.autograd.functional.jvp(linear, tokens, tangent)[1]  # by two backward passes
    assert expected.abs().max() > 0
    torch.testing.assert_close(got, expected)

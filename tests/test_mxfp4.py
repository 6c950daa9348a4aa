"""The format against independent oracles: ml_dtypes, gguf, compressed-tensors, onnx vectors, brute force.

K is the width of a row, a the largest magnitude of a block of 32.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import hf_mxfp4
from hf_mxfp4 import MXFP4Tensor, dequantize, mxfp4, quantize

RULES = mxfp4.SCALE_RULES
TIES = mxfp4.TIES
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
JUST_ABOVE_6, JUST_BELOW_7 = np.nextafter(np.float32([6, 7]), np.float32(6.5)).tolist()


def every_pair():
    """Every code with every scale byte, each code in a low and in a high nibble: blocks [256, 16], scales [256, 1]."""
    codes = torch.cat([torch.arange(16), (torch.arange(16) + 1) % 16]).to(torch.uint8)
    row = codes[::2] | codes[1::2] << 4
    return MXFP4Tensor(row.repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None])


def weights(kind, dtype=torch.float32, shape=(64, 256), seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    if kind == "heavy-tailed":  # Student's t with 3 degrees of freedom
        weight = weight / (torch.randn((3, *shape), generator=generator).square().mean(0)).sqrt()
    return (0.02 * weight).to(dtype)


def block(*values, dtype=torch.float32):
    """One block, [32], padded with zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=dtype)


# Decoding


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_all_4096_pairs_decode_as_ml_dtypes_to_the_bit(dtype, decode, assert_same_bits):
    packed = every_pair()
    exact = decode(*packed).numpy()
    numpy_dtype = ml_dtypes.bfloat16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")
    with np.errstate(over="ignore"):
        cast = exact.astype(numpy_dtype)
    expected = torch.from_numpy(cast.view(np.int16)).view(dtype) if dtype is torch.bfloat16 else torch.from_numpy(cast)
    assert_same_bits(dequantize(*packed, dtype), expected)
    assert_same_bits(packed.dequantize(dtype), expected)


@pytest.mark.parametrize(
    ("byte", "scale", "first", "second"),
    [
        pytest.param(0x21, 128, 1.0, 2.0, id="the low nibble is the even column"),
        pytest.param(0x21, 127, 0.5, 1.0, id="127 is times one"),
        pytest.param(0x21, 126, 0.25, 0.5, id="126 is times a half, not times 126"),
        pytest.param(0x77, 0, 6 * 2.0**-127, 6 * 2.0**-127, id="byte 0 is 2^-127, not zero"),
        pytest.param(0x21, 254, 2.0**126, 2.0**127, id="byte 254 is finite where the value fits"),
        pytest.param(0x87, 254, float("inf"), -0.0, id="and infinite only where it does not"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_literal_bytes(byte, scale, first, second, dtype, assert_same_bits):
    got = dequantize(torch.full((16,), byte, dtype=torch.uint8), torch.tensor([scale], dtype=torch.uint8), dtype)
    assert_same_bits(got[:2], torch.tensor([first, second], dtype=dtype))


def test_scale_byte_255_makes_its_whole_block_nan_and_no_other():
    blocks, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.tensor([[127, 255], [255, 0]], dtype=torch.uint8)
    expected = torch.tensor([[False, True], [True, False]]).repeat_interleave(32, dim=-1)
    for dtype in DTYPES:
        assert torch.equal(dequantize(blocks, scales, dtype).isnan(), expected)


def test_scales_are_torchs_own_e8m0_by_view_never_by_cast(assert_same_bits):
    scales = torch.arange(256, dtype=torch.uint8)
    ones = torch.full((256, 16), 0x22, dtype=torch.uint8)
    as_e8m0 = scales.view(torch.float8_e8m0fnu)
    got = dequantize(ones.flatten(), as_e8m0)
    assert_same_bits(got.view(256, 32), as_e8m0.float()[:, None].repeat(1, 32))
    assert_same_bits(got, dequantize(ones.flatten(), scales))


def test_gguf_decodes_the_same_values():
    """Bytes 0 to 254; gguf gives +0 for code 8, so values are compared and not signs of zero."""
    blocks, scales = (part[:255] for part in every_pair())
    with np.errstate(over="ignore"):
        expected = gguf.dequantize(to_gguf(blocks, scales), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(dequantize(blocks, scales), torch.from_numpy(expected))


def test_compressed_tensors_decodes_the_same_bits(assert_same_bits):
    blocks, scales = (part[1:255] for part in every_pair())
    decoded = MXFP4PackedCompressor.decompress({"weight_packed": blocks, "weight_scale": scales}, CT_SCHEME)
    assert_same_bits(dequantize(blocks, scales, torch.bfloat16), decoded["weight"])


def test_blocks_of_16_bytes_apart_and_other_byte_dtypes_are_the_same_weight(random_packed, assert_same_bits):
    blocks, scales = random_packed(2, 3, 96)
    expected = dequantize(blocks, scales)
    for view in (blocks.view(2, 3, 3, 16), blocks.view(torch.int8), blocks.view(torch.float4_e2m1fn_x2)):
        assert_same_bits(dequantize(view, scales), expected)


def test_packed_bytes_need_not_be_contiguous(random_packed, assert_same_bits):
    blocks, scales = random_packed(4, 6, 64)
    got = dequantize(blocks.transpose(0, 1), scales.transpose(0, 1))
    assert_same_bits(got, dequantize(blocks, scales).transpose(0, 1))


@pytest.mark.parametrize(
    ("blocks", "scales", "error", "message"),
    [
        pytest.param((2, 16), (2, 2), ValueError, r"blocks \[2, 16\].*scales \[2, 2\]", id="half the codes"),
        pytest.param((2, 32), (3, 2), ValueError, r"blocks \[2, 32\].*scales \[3, 2\]", id="other rows"),
        pytest.param((2, 2, 8), (2, 2), ValueError, r"blocks \[2, 2, 8\]", id="groups of 8 bytes, NVFP4's"),
        pytest.param((16,), (), ValueError, r"blocks \[16\].*scales \[\]", id="no scales"),
        pytest.param((2, 2, 2, 16), (2, 2), ValueError, r"\[2, 2, 2, 16\]", id="two dimensions too many"),
    ],
)
def test_packed_shapes_that_do_not_fit_are_refused(blocks, scales, error, message):
    with pytest.raises(error, match=message):
        dequantize(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))


def test_packed_tensors_and_results_of_other_dtypes_are_refused():
    blocks, scales = torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"scales have dtype torch\.float32.*uint8"):
        dequantize(blocks, scales.float())
    with pytest.raises(TypeError, match=r"blocks have dtype torch\.int32"):
        dequantize(blocks.int(), scales)
    with pytest.raises(TypeError, match=r"torch\.int8.*floating point"):
        dequantize(blocks, scales, torch.int8)


# Quantizing: which scale


@pytest.mark.parametrize("exponent", [-100, 0, 100])  # a rule must not know where the binade lies
@pytest.mark.parametrize(
    ("largest", "floor", "even", "rceil"),
    [
        (1.2, 125, 125, 125),
        (2.7, 126, 126, 126),
        (5.5, 127, 127, 127),  # these three: a scale one too small clips them
        (3.4, 126, 126, 127),  # between 3 and 3.5
        (6.0, 127, 127, 127),
        (6.001, 127, 127, 128),
        (JUST_ABOVE_6, 127, 127, 128),
        (6.5, 127, 127, 128),
        (6.999, 127, 127, 128),
        (JUST_BELOW_7, 127, 127, 128),
        (7.0, 127, 128, 128),
        (7.3, 127, 128, 128),
        (8.0, 128, 128, 128),
    ],
)
def test_scale_rules_at_the_top_of_the_binade(largest, floor, even, rceil, exponent):
    weight = block(0.1, -largest) * 2.0**exponent
    got = {rule: quantize(weight, rule).scales.item() - exponent for rule in ("floor", "even", "rceil")}
    assert got == {"floor": floor, "even": even, "rceil": rceil}


@pytest.mark.parametrize(
    ("values", "byte"),
    [
        pytest.param([6.5], 127, id="tie: both round it to 6"),
        pytest.param([7.0], 127, id="tie: 6 and 8 are as near"),
        pytest.param([7.1], 128, id="8 is nearer than 6"),
        pytest.param([7.1, 0.5, 0.5, 0.5, 0.5, 0.5], 127, id="the small ones weigh more"),
    ],
)
def test_mse_takes_the_smaller_error_and_floor_on_a_tie(values, byte):
    assert quantize(block(*values), "mse").scales.item() == byte


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed"])
def test_mse_equals_a_brute_force_search(kind, dtype, assert_same_bits):
    weight = weights(kind, dtype, (256, 256))
    x = weight.double().numpy().reshape(-1, 32)
    floor = np.floor(np.log2(np.abs(x).max(-1))).astype(int) - 2
    error = []
    for exponent in (floor, floor + 1):
        scaled = np.abs(x) * np.exp2(-exponent)[:, None]
        nearest = np.abs(scaled[..., None] - MAGNITUDES).min(-1)
        error.append((np.square(nearest) * np.exp2(2 * exponent)[:, None]).sum(-1))
    moved = error[1] < error[0]
    assert 0.05 < moved.mean() < 0.3  # both choices are tested
    assert np.array_equal(quantize(weight, "mse").scales.numpy().reshape(-1), floor + 127 + moved)


# Quantizing: which codes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ties", TIES)
def test_every_code_is_the_nearest_and_ties_go_where_they_are_told(rule, ties, decode):
    """bfloat16 weights, of which one in a hundred lies halfway between two codes."""
    weight = weights("gaussian", torch.bfloat16)
    packed = quantize(weight, rule, ties)
    scaled = weight.double().view(-1, 32).numpy() / np.exp2(packed.scales.double().view(-1, 1).numpy() - 127)
    distance = np.abs(np.abs(scaled)[..., None] - MAGNITUDES)
    is_nearest = distance == distance.min(-1, keepdims=True)
    lower, upper = is_nearest.argmax(-1), 7 - is_nearest[..., ::-1].argmax(-1)
    assert (lower != upper).sum() > 50  # there are ties
    expected = {"zero": lower, "away": upper, "even": np.where(lower % 2, upper, lower)}[ties]
    codes = np.stack([packed.blocks & 15, packed.blocks >> 4], -1).reshape(-1, 32)
    assert np.array_equal(codes & 7, expected)
    assert np.array_equal(codes >> 3, np.signbit(scaled))


def test_onnx_vectors_of_element_rounding():
    """onnx 1.19.1, node test cast_FLOAT_to_FLOAT4E2M1: the elements that floor keeps at scale 1.

    The others of its 15 are NaN and infinities, refused here, and 8 and more, which move the scale.
    """
    values = [0.48, 0.25, 1.05, -3.5, 1e-7, -4.0, 0.01, -0.0]
    packed = quantize(block(*values), "floor")
    assert packed.scales.item() == 127
    assert bytes(packed.blocks[:4].tolist()) == bytes([0x01, 0xE2, 0xE0, 0x80])


def test_onnx_vectors_of_scales_rounded_up():
    """onnx 1.19.1, node test cast_e8m0_FLOAT_to_FLOAT8E8M0 (round_mode up); its zero is a scale of 1 here."""
    values = [0.124, 0.25, 0.5, 1.1, 2, 4, 8]
    packed = quantize(torch.stack([block(6 * value) for value in values]), "rceil")
    assert bytes(packed.scales.flatten().tolist()) == bytes([0x7C, 0x7D, 0x7E, 0x80, 0x80, 0x81, 0x82])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed"])
def test_floor_with_ties_to_zero_writes_ggufs_bytes(kind, dtype):
    """In canonical order, after its order of halves is undone. gguf never writes code 8: ours is 0 there."""
    weight = weights(kind, dtype)
    ours = quantize(weight, "floor", "zero")
    raw = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.MXFP4).reshape(-1, 17)
    codes = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=-1)
    assert np.array_equal(ours.scales.numpy().reshape(-1), raw[:, 0])
    assert np.array_equal(plus_zero(ours.blocks).numpy().reshape(-1, 16), codes[:, ::2] | codes[:, 1::2] << 4)


def test_ggufs_tie_rule_shows_on_bfloat16():
    """So that the test above can fail."""
    weight = weights("gaussian", torch.bfloat16)
    assert not torch.equal(quantize(weight, "floor", "zero").blocks, quantize(weight, "floor", "even").blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_writes_compressed_tensors_bytes(dtype):
    weight = weights("heavy-tailed", dtype)
    groups = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), CT_SCHEME.weights)
    theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, CT_SCHEME)
    ours = quantize(weight, "even", "even")
    assert torch.equal(ours.scales, theirs["weight_scale"])
    assert torch.equal(ours.blocks, theirs["weight_packed"])


# Quantizing: the ends of the range


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_zeros_come_back_exactly(rule, dtype, assert_same_bits):
    zeros = torch.cat([torch.zeros(3, 64, dtype=dtype), -torch.zeros(3, 64, dtype=dtype)])
    packed = quantize(zeros, rule)
    assert not packed.scales.any()
    assert_same_bits(packed.dequantize(dtype), zeros)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("largest", "byte", "code"),
    [
        pytest.param(2.0**-149, 0, 0, id="smallest float32"),
        pytest.param(2.0**-130, 0, 0, id="an eighth of the smallest scale"),
        pytest.param(2.0**-128, 0, 1, id="half of the smallest scale"),
        pytest.param(2.0**-126, 0, 4, id="smallest normal float32"),
        pytest.param(6 * 2.0**-127, 0, 7, id="largest of byte 0"),
        pytest.param(2.0**-124, 1, 6, id="first of byte 1"),
    ],
)
def test_blocks_below_the_smallest_scale_do_not_wrap(largest, byte, code, rule):
    packed = quantize(block(largest, -largest), rule)
    assert packed.scales.tolist() == [byte]
    assert packed.blocks.tolist() == [code | (code | 8) << 4, *[0] * 15]


@pytest.mark.parametrize(
    ("rule", "byte", "code"), [("floor", 252, 7), ("even", 253, 6), ("rceil", 253, 6), ("mse", 253, 6)]
)
def test_the_largest_finite_float32_does_not_wrap(rule, byte, code):
    largest = torch.finfo(torch.float32).max
    packed = quantize(block(-largest, 1.0), rule)
    assert (packed.scales.item(), packed.blocks[0].item()) == (byte, 8 | code)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("shape", "index"),
    [((64,), (40,)), ((7, 64), (6, 33)), ((2, 7, 64), (1, 3, 63)), ((2, 3, 4, 32), (1, 2, 3, 0))],
    ids=["1-D", "2-D", "3-D", "4-D"],
)
def test_a_value_that_is_not_finite_is_named_by_tensor_and_index(shape, index, rule, value, monkeypatch):
    monkeypatch.setattr(mxfp4, "QUANTIZE_CHUNK_BYTES", 2 * 64 * 16)  # so that it lies in a later chunk
    weight = torch.ones(shape)
    weight[index] = value
    where = str(list(index)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=rf"layer\.7\.down holds {value} at index {where}"):
        quantize(weight, rule, name="layer.7.down")


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        pytest.param(torch.zeros(2, 32).double(), TypeError, r"up\b.*float64", id="float64"),
        pytest.param(torch.zeros(2, 32, dtype=torch.int32), TypeError, r"up\b.*int32", id="integer"),
        pytest.param(torch.zeros(2, 40), ValueError, r"up\b.*width 40.*multiple of 32", id="width 40"),
        pytest.param(torch.zeros(()), ValueError, r"up\b", id="no dimension"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused_by_name(weight, error, message):
    with pytest.raises(error, match=message):
        quantize(weight, name="up")


def test_unknown_rules_are_refused_and_the_known_ones_listed():
    with pytest.raises(ValueError, match=r"'ceil'.*mse, even, floor, rceil"):
        quantize(torch.zeros(32), "ceil")
    with pytest.raises(ValueError, match=r"'down'.*even, zero, away"):
        quantize(torch.zeros(32), "mse", "down")


# Quantizing: the layout in memory does not matter


@pytest.mark.parametrize(
    "shape",
    [(32,), (3, 64), (2, 3, 32), (2, 1, 3, 64), (0,), (0, 64), (2, 0, 32), (0, 3, 32), (3, 0)],
    ids=["1-D", "2-D", "3-D", "4-D", "empty", "no rows", "no rows in a stack", "no experts", "no columns"],
)
def test_any_leading_dimensions(shape):
    weight = weights("gaussian", shape=shape)
    packed = quantize(weight)
    assert packed.blocks.shape == (*shape[:-1], shape[-1] // 2)
    assert packed.scales.shape == (*shape[:-1], shape[-1] // 32)
    assert packed.dequantize().shape == shape
    rows = [quantize(row) for row in weight.reshape(-1, max(shape[-1], 1))]
    for part, of_rows in zip(packed, zip(*rows, strict=True), strict=False):
        assert torch.equal(part.flatten(), torch.cat(of_rows))


@pytest.mark.parametrize("chunk", [1, 5 * 64 * 16, 16 << 20], ids=["row by row", "5 rows of 7", "all"])
@pytest.mark.parametrize("rule", RULES)
def test_chunks_and_strides_do_not_show_in_the_bytes(rule, chunk, monkeypatch):
    stack = weights("heavy-tailed", shape=(3, 64, 7))
    expected = quantize(stack.mT.contiguous(), rule)
    before = stack.clone()
    monkeypatch.setattr(mxfp4, "QUANTIZE_CHUNK_BYTES", chunk)
    for view in (stack.mT, stack.mT.contiguous()):  # as is_transposed classes hold them, and not
        got = quantize(view, rule)
        assert torch.equal(got.blocks, expected.blocks)
        assert torch.equal(got.scales, expected.scales)
    assert torch.equal(stack, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_quantizing_a_big_stack_takes_little_memory():
    """A transposed bfloat16 stack of 2^25 weights: a float32 copy is 128 MiB, of one of its matrices 64 MiB."""
    code = """if True:
        import torch
        from hf_mxfp4 import quantize
        def peak():
            return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) << 10
        quantize(torch.ones(2, 32))
        weight = torch.ones(2, 4096, 4096, dtype=torch.bfloat16).mT
        before = peak()
        packed = quantize(weight)
        print(peak() - before - sum(part.numel() for part in packed))
    """
    extra = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert extra < 3 * mxfp4.QUANTIZE_CHUNK_BYTES


@pytest.mark.parametrize("shape", [(1 << 16,), (2, 1 << 15)], ids=["1-D", "two wide rows"])
def test_a_wide_row_is_cut_into_chunks_too(shape, monkeypatch):
    monkeypatch.setattr(mxfp4, "QUANTIZE_CHUNK_BYTES", 1 << 16)
    sizes, original = [], mxfp4._scale_bytes

    def scale_bytes(chunk, *args):
        sizes.append(16 * chunk.numel())
        return original(chunk, *args)

    monkeypatch.setattr(mxfp4, "_scale_bytes", scale_bytes)
    mxfp4.quantize(torch.ones(shape))
    assert sum(sizes) == 16 << 16
    assert max(sizes) <= 1 << 16


# Round trips


@given(
    raw=st.binary(min_size=16, max_size=16),
    scale=st.integers(0, 252),  # from 253 on code 6 or 7 is past float32
    rule=st.sampled_from(RULES),
    ties=st.sampled_from(TIES),
)
@settings(max_examples=50, deadline=None)
def test_requantizing_loses_no_value(raw, scale, rule, ties):
    packed = MXFP4Tensor(torch.frombuffer(bytearray(raw), dtype=torch.uint8), torch.tensor([scale], dtype=torch.uint8))
    assert torch.equal(quantize(packed.dequantize(), rule, ties).dequantize(), packed.dequantize())


@pytest.mark.parametrize("rule", RULES)
def test_requantizing_loses_no_value_at_any_scale(rule, assert_same_bits):
    blocks, scales = (part[:253] for part in every_pair())
    values = dequantize(blocks, scales)
    assert_same_bits(quantize(values, rule).dequantize(), values)


@given(
    values=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=32, max_size=32),
    rule=st.sampled_from(RULES),
)
@settings(max_examples=50, deadline=None)
def test_any_block_is_rounded_to_the_nearest_values_of_its_scale(values, rule):
    packed = quantize(torch.tensor(values), rule)
    once = packed.dequantize()
    assert torch.equal(quantize(once, rule).dequantize(), once)
    step = 2.0 ** (packed.scales.item() - 127)
    error = np.abs(np.array(values) - once.double().numpy())
    assert np.array_equal(error, np.abs(np.abs(np.array(values))[:, None] - MAGNITUDES * step).min(-1))


def relative_rmse(weight):
    return ((quantize(weight).dequantize() - weight.float()).norm() / weight.float().norm()).item()


def test_error_of_the_default_rule_on_gaussian_and_trained_weights():
    """floor gives 0.115 on both, `mse` 0.112."""
    assert relative_rmse(weights("gaussian", shape=(1024, 256))) < 0.113
    tensors = load_file(f"{hf_mxfp4.demo_model_path()}/model.safetensors")
    experts = [tensor for name, tensor in tensors.items() if ".experts." in name]
    assert sum(tensor.numel() for tensor in experts) == 294_912
    assert relative_rmse(torch.cat([tensor.flatten() for tensor in experts])) < 0.113


CT_SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    ),
)


def to_gguf(blocks, scales):
    """GGUF's 17-byte blocks: the scale, then byte j with columns j (low) and j + 16 (high)."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(-1, 32)
    return np.concatenate([scales.reshape(-1, 1), codes[:, :16] | codes[:, 16:] << 4], axis=-1)


def plus_zero(blocks):
    """Code 8 becomes 0."""
    low, high = blocks & 15, blocks >> 4
    return low.masked_fill(low == 8, 0) | high.masked_fill(high == 8, 0) << 4

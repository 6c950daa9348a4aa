"""NVFP4 and Q4_K, which are decoded to float32: against gguf, ml_dtypes and compressed-tensors, and bytes by hand."""

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16

from hf_mxfp4.formats import nvfp4, q4_k

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
EVERY_CODE = torch.arange(16, dtype=torch.uint8)
EVERY_PAIR = EVERY_CODE[::2] | EVERY_CODE[1::2] << 4
HALVES = EVERY_CODE[:8] | EVERY_CODE[8:] << 4


def random_bytes(*shape, seed=0):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_gguf(blocks, kind):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind).astype(np.float32))


def by_ml_dtypes(codes, scales):
    """float64 [..., K] of value * E4M3, in which the product with a float32 is exact."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).numpy()
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    steps = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return torch.from_numpy(values * np.repeat(steps, 16, axis=-1))


# Powers of two change no digit; the others round; the last makes subnormal weights of many.
@pytest.mark.parametrize("factor", [1.0, 2.0**-9, 0.0123, 371.7, 3e-39])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4_is_the_exact_product_rounded_once_for_every_scale_byte_and_code(factor, reciprocal, assert_same_bits):
    codes, scales = EVERY_PAIR.repeat(256, 1), EVERY_BYTE[:, None]
    factor = torch.tensor(1 / factor if reciprocal else factor)
    exact = by_ml_dtypes(codes, scales)
    # A quotient of two float32 that is rounded to float64 and then to float32 is rounded as if once.
    expected = (exact / factor.double() if reciprocal else exact * factor.double()).float()
    for held in (scales, scales.view(torch.float8_e4m3fn)):
        assert_same_bits(nvfp4.decode(codes, held, factor, reciprocal=reciprocal), expected)
    assert expected.isnan().all(dim=-1).nonzero().flatten().tolist() == [0x7F, 0xFF]


# One block; a width that is no multiple of 32; a stack; none at all.
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (2, 5, 64), (2, 2, 3, 32), (0, 32)])
def test_nvfp4_of_random_bytes_in_any_shape(shape, assert_same_bits):
    *lead, width = shape
    codes, scales = random_bytes(*lead, width // 2), random_bytes(*lead, width // 16, seed=1)
    got = nvfp4.decode(codes, scales, torch.tensor(0.5), reciprocal=False)
    assert_same_bits(got, (by_ml_dtypes(codes, scales) * 0.5).float())


def test_nvfp4_takes_a_scale_for_each_expert_and_tensors_that_are_not_contiguous(assert_same_bits):
    codes, scales = random_bytes(4, 3, 16).transpose(0, 1), random_bytes(4, 3, 2, seed=1).transpose(0, 1)
    each = torch.tensor([0.3, 5.0, 0.07]).reshape(3, 1, 1)
    expected = (by_ml_dtypes(codes, scales) * each).float()
    before = codes.clone()
    assert_same_bits(nvfp4.decode(codes, scales, each, reciprocal=False), expected)
    assert torch.equal(codes, before)
    for e in range(3):  # as a checkpoint with a tensor for each expert has it
        one = nvfp4.decode(codes[e], scales[e], each[e, 0], reciprocal=False)
        assert_same_bits(one, expected[e])


def test_nvfp4_of_modelopt_laid_by_hand():
    # amax 13.125 = 6 * 448 * scale_2; E4M3 0x2A is 0.3125 and 0x38 is 1.
    scale_2 = torch.tensor(13.125) / (6 * 448)
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 8], codes[0, 15] = 0x75, 0x21, 0xF0
    scales = torch.tensor([[0x2A, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = torch.zeros(1, 32)
    expected[0, 0], expected[0, 1], expected[0, 16], expected[0, 17], expected[0, 31] = (
        3 * 0.3125,
        6 * 0.3125,
        0.5,
        1,
        -6,
    )
    got = nvfp4.decode(codes, scales, scale_2, reciprocal=False)
    assert torch.equal(got, expected * 13.125 / 2688)


# A power of two, where the producer's own decode rounds nothing either; one where it rounds to bfloat16.
@pytest.mark.parametrize(("global_scale", "tolerance"), [(512.0, 0.0), (None, 2**-7)])
def test_nvfp4_of_compressed_tensors_is_divided(global_scale, tolerance):
    scheme = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **NVFP4A16)
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(3))
    groups = weight.unflatten(-1, (-1, 16)).abs().amax(dim=-1)
    factor = torch.tensor([global_scale]) if global_scale else 6 * 448 / groups.amax().reshape(1)
    steps = (groups / 6 * factor).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": steps.float(), "weight_global_scale": factor}
    written = NVFP4PackedCompressor.compress(state, scheme)
    assert written["weight_packed"].dtype == torch.uint8
    assert written["weight_scale"].dtype == torch.float8_e4m3fn

    packed = (written["weight_packed"], written["weight_scale"], written["weight_global_scale"])
    got = nvfp4.decode(*packed, reciprocal=True)
    theirs = NVFP4PackedCompressor.decompress(written, scheme)["weight"].float()
    torch.testing.assert_close(got, theirs, rtol=tolerance, atol=0)
    assert (got - weight).abs().max() < weight.abs().max() / 6  # half a step, the largest of which is 2 of 6
    wrong = nvfp4.decode(*packed, reciprocal=False)
    assert (wrong.norm() / got.norm()).item() == pytest.approx(factor.item() ** 2, rel=1e-5)


def test_nvfp4_of_gguf_for_every_scale_byte_and_code():
    # Each block has every code under four of the scales.
    blocks = torch.cat([EVERY_BYTE.view(64, 4), HALVES.repeat(64, 4)], dim=-1)
    got, expected = nvfp4.decode_gguf(blocks), by_gguf(blocks, gguf.GGMLQuantizationType.NVFP4)
    by_scale, expected = got.view(256, 16), expected.view(256, 16)
    assert torch.equal(by_scale[:255], expected[:255])
    assert not by_scale[[0x00, 0x7F, 0x80, 0xFF]].any()
    assert torch.equal(by_scale[0x80:], by_scale[:0x80])  # bit 7 is ignored
    assert expected[255].abs().max() == 6 * 480  # theirs, of a byte that stands for no number
    assert by_scale[:, 8].signbit().all()
    assert torch.equal(by_scale[0x38], torch.tensor(nvfp4.E2M1_VALUES))


@pytest.mark.parametrize("shape", [(1, 36), (3, 72), (2, 5, 108), (0, 36)])
def test_nvfp4_of_gguf_of_random_bytes(shape):
    blocks = random_bytes(*shape)
    blocks.unflatten(-1, (-1, 36))[..., :4].clamp_(max=0xFE)
    got = nvfp4.decode_gguf(blocks)
    assert got.dtype == torch.float32
    assert got.shape == (*shape[:-1], shape[-1] // 36 * 64)
    if blocks.numel():
        assert torch.equal(got, by_gguf(blocks, gguf.GGMLQuantizationType.NVFP4))


def test_nvfp4_of_gguf_and_of_safetensors_hold_the_same_weights(assert_same_bits):
    nibbles = random_bytes(2, 128) & 15
    scales = random_bytes(2, 8, seed=1) & 0x3F
    groups = nibbles.view(2, 2, 4, 16)
    halves = groups[..., :8] | groups[..., 8:] << 4
    blocks = torch.cat([scales.view(2, 2, 4), halves.flatten(-2)], dim=-1).flatten(-2)
    codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    expected = nvfp4.decode(codes, scales, torch.tensor(1.0), reciprocal=False)
    assert_same_bits(nvfp4.decode_gguf(blocks), expected)


U8, F32 = torch.uint8, torch.float32


@pytest.mark.parametrize(
    ("codes", "scales", "factor", "says"),
    [
        (((4, 16), F32), ((4, 2), U8), ((), F32), "codes have dtype torch.float32; expected torch.uint8"),
        (((4, 16), U8), ((4, 2), F32), ((), F32), "scales have dtype torch.float32; expected torch.float8_e4m3fn"),
        (((4, 16), U8), ((4, 2), U8), ((), torch.bfloat16), "tensor_scale has dtype torch.bfloat16; expected torch.fl"),
        # MXFP4's scales, one for 32
        (
            ((4, 16), U8),
            ((4, 1), U8),
            ((), F32),
            r"codes \[4, 16\] do not fit scales \[4, 1\]; expected codes \[\.\.\., N",
        ),
        (((4, 16), U8), ((3, 2), U8), ((), F32), r"codes \[4, 16\] do not fit scales \[3, 2\]"),
        (((), U8), ((), U8), ((), F32), r"codes \[\] do not fit scales \[\]"),
        # Experts that would be taken for columns, and one too many.
        (
            ((3, 4, 16), U8),
            ((3, 4, 2), U8),
            ((3,), F32),
            r"tensor_scale \[3\] does not fit codes \[3, 4, 16\]; .* \[3, 1, 1\]",
        ),
        (((3, 4, 16), U8), ((3, 4, 2), U8), ((2, 1, 1), F32), r"tensor_scale \[2, 1, 1\] does not fit"),
        (((4, 16), U8), ((4, 2), U8), ((3, 1, 1), F32), r"tensor_scale \[3, 1, 1\] does not fit"),
    ],
)
def test_nvfp4_says_what_does_not_fit(codes, scales, factor, says):
    tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in (codes, scales, factor)]
    with pytest.raises(ValueError, match=says):
        nvfp4.decode(*tensors, reciprocal=False)


@pytest.mark.parametrize(("decode", "size"), [(nvfp4.decode_gguf, "64 * 36"), (q4_k.decode, "256 * 144")])
def test_gguf_blocks_say_what_does_not_fit(decode, size):
    with pytest.raises(ValueError, match=r"blocks have dtype torch\.int8; expected torch\.uint8"):
        decode(torch.zeros(2, 144, dtype=torch.int8))
    with pytest.raises(
        ValueError, match=r"blocks \[2, 143\] are not whole blocks of .*K / " + size.replace("*", r"\*")
    ):
        decode(torch.zeros(2, 143, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"blocks \[\] are not whole"):
        decode(torch.tensor(0, dtype=torch.uint8))


# Random d and dmin are any float16, infinities and NaN among them.
@pytest.mark.parametrize("shape", [(1, 144), (500, 144), (7, 3, 288), (0, 144)])
def test_q4_k_of_random_bytes(shape, assert_same_bits):
    blocks = random_bytes(*shape)
    got = q4_k.decode(blocks)
    expected = by_gguf(blocks, gguf.GGMLQuantizationType.Q4_K) if blocks.numel() else torch.empty(0, 256)
    assert_same_bits(got, expected)


def test_q4_k_for_every_scale_and_minimum_in_every_sub_block(assert_same_bits):
    # Every byte in each of the 12 places that scales and minima are packed in, with d = 1 and dmin = 0.5.
    blocks = random_bytes(12, 256, 144)
    blocks[..., :4] = torch.tensor([1.0, 0.5], dtype=torch.float16).view(torch.uint8)
    for place in range(12):
        blocks[place, :, 4 + place] = EVERY_BYTE
    assert_same_bits(q4_k.decode(blocks), by_gguf(blocks, gguf.GGMLQuantizationType.Q4_K))


@pytest.mark.parametrize("offset", [1, 2, 7])
@pytest.mark.parametrize(("decode", "size"), [(nvfp4.decode_gguf, 36), (q4_k.decode, 144)])
def test_gguf_blocks_may_lie_anywhere_and_are_not_changed(decode, size, offset, assert_same_bits):
    for count in (1, 3):  # one block is contiguous wherever it is cut from
        memory = random_bytes(offset + count * size)
        before = memory.clone()
        blocks = memory[offset:].view(count, size)
        assert_same_bits(decode(blocks), decode(blocks.clone()))
        assert_same_bits(decode(blocks.expand(2, count, size))[1], decode(blocks))
        assert torch.equal(memory, before)

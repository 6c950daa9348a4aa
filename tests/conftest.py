"""What the tests share: independent oracles and makers of packed weights, as fixtures.

E experts, N output features, K input features. The oracle for every decode is ml_dtypes, which shares no code with
hf_mxfp4; it gives float64, in which every product of a code and a scale is exact.
"""

import os

# Before Triton is imported by anything: its kernels are interpreted here, on tensors of the CPU.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network for anything

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def surroundings():
    """One thread; no backend forced from outside; memory that is read before it is written is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_MXFP4_BACKEND", raising=False)
        yield


@pytest.fixture(scope="session")
def decode():
    """decode(blocks [..., K/2], scales [..., K/32]) -> float64 [..., K], by ml_dtypes."""

    def decode(blocks, scales):
        blocks, scales = blocks.numpy(), scales.view(torch.uint8).numpy()
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        return torch.from_numpy(values * np.repeat(powers, 32, axis=-1))

    return decode


@pytest.fixture(scope="session")
def random_packed():
    """random_packed(*lead, K, seed=0) -> blocks [*lead, K/2] of any code, scales [*lead, K/32] of 2^-7 to 2^-1."""

    def random_packed(*shape, seed=0):
        *lead, width = shape
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randint(256, (*lead, width // 2), dtype=torch.uint8, generator=generator)
        return blocks, torch.randint(120, 127, (*lead, width // 32), dtype=torch.uint8, generator=generator)

    return random_packed


@pytest.fixture(scope="session")
def assert_same_bits():
    """assert_same_bits(got, expected): equal dtype, shape and bits, any NaN for NaN; names the first difference."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}

    def assert_same_bits(got, expected):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        bits = [t.contiguous().view(integers[t.element_size()]) for t in (got, expected)]
        differ = ((bits[0] != bits[1]) & ~(got.isnan() & expected.isnan())).nonzero()
        if len(differ):
            at = tuple(differ[0].tolist())
            pytest.fail(f"{len(differ)} differ, first at {at}: {got[at].item()!r}, expected {expected[at].item()!r}")

    return assert_same_bits


@pytest.fixture(scope="session")
def assert_rounded_once():
    """assert_rounded_once(got, exact, magnitude): float32 sums (float64 for float64), then one cast to got's dtype.

    `exact` float64; `magnitude` is what it would be if nothing cancelled. Allowed are half a unit in the last place of
    got's dtype for the cast and 16 units of the accumulator's for the sums: one more rounding to bfloat16 is caught.
    """

    def assert_rounded_once(got, exact, magnitude):
        accumulator = torch.finfo(torch.promote_types(got.dtype, torch.float32))
        out = torch.finfo(got.dtype)
        binade = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=out.tiny))))
        bound = 0.5 * out.eps * binade + 16 * accumulator.eps * magnitude
        excess = (got.double() - exact).abs() - bound
        assert (excess <= 0).all(), f"off by {excess.max().item():.2e} more than one rounding"

    return assert_rounded_once


# Modeling module, experts class, config class, and the names that the config has for E, H and I.
FAMILIES = {
    "mixtral": "mixtral MixtralExperts MixtralConfig num_local_experts hidden_size intermediate_size",
    "qwen3_moe": "qwen3_moe Qwen3MoeExperts Qwen3MoeConfig num_experts hidden_size moe_intermediate_size",
    "deepseek_v3": "deepseek_v3 DeepseekV3Experts DeepseekV3Config n_routed_experts hidden_size moe_intermediate_size",
    # [E, in, out], gate and up rows interleaved, biases, an activation of its own
    "gpt_oss": "gpt_oss GptOssExperts GptOssConfig num_local_experts hidden_size intermediate_size",
    # no gate, squared ReLU
    "nemotron_h": "nemotron_h NemotronHExperts NemotronHConfig n_routed_experts hidden_size moe_intermediate_size",
    # the same in a space narrower than the model's
    "nemotron_h latent": "nemotron_h NemotronHExperts NemotronHConfig n_routed_experts moe_latent_size "
    "moe_intermediate_size",
    # a norm after each expert
    "muse_spark": "muse_spark MuseSparkExperts MuseSparkTextConfig num_local_experts moe_hidden_size "
    "moe_intermediate_size",
}


@pytest.fixture(scope="session")
def stock_experts():
    """stock_experts(family, E, H, I, dtype) -> Transformers' own experts module, random, on its eager path."""

    def stock_experts(family, experts=4, hidden=64, intermediate=96, dtype=torch.float32, seed=0):
        module, name, config_name, *sizes = FAMILIES[family].split()
        modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
        config_class = getattr(transformers, config_name, None) or getattr(modeling, config_name)
        config = config_class(**dict(zip(sizes, (experts, hidden, intermediate), strict=True)))
        config._experts_implementation = "eager"
        stock = getattr(modeling, name)(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in stock.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.2).to(dtype)
        return stock

    return stock_experts

"""The report says what is held, the check finds a backend that is wrong, and the assertion names what is not packed."""

import json

import pytest
import torch
from torch import nn

from hf_mxfp4 import MXFP4Experts, NotPackedError, assert_packed, mxfp4, packed_report
from hf_mxfp4.backends import choose, cpu, reference, unavailable

FAMILIES = ["mixtral", "gpt_oss", "nemotron_h", "muse_spark"]
WEIGHTS = 4 * (192 * 64 + 64 * 96)  # of a gated module with E = 4, H = 64, I = 96


@pytest.fixture
def model_of(stock_experts):
    """model_of("mixtral", "packed gpt_oss") -> a model with these experts modules as layers.0, layers.1."""

    def model_of(*layers, dtype=torch.bfloat16):
        modules = []
        for layer in layers:
            stock = stock_experts(layer.removeprefix("packed "), dtype=dtype)
            modules.append(MXFP4Experts.from_dense(stock) if layer.startswith("packed") else stock)
        model = nn.Module()
        model.layers = nn.ModuleList(modules)
        model.head = nn.Linear(64, 8)
        return model

    return model_of


def test_rows_of_packed_and_of_dense_experts(model_of):
    report = packed_report(model_of("packed mixtral", "gpt_oss"))
    packed, dense = report.rows
    assert (packed.name, packed.experts_class, packed.packed) == ("layers.0", "MixtralExperts", True)
    assert (packed.source, packed.source_dtypes) == ("dense module", ("bfloat16",))
    assert packed.conversion == "quantized: mse, ties even"
    assert (packed.backend, packed.reason) == choose("auto", "cpu")
    assert packed.error is None
    assert (packed.weights, packed.bytes) == (WEIGHTS, WEIGHTS * 17 // 32)
    assert packed.bits_per_weight == 4.25
    assert (dense.name, dense.experts_class, dense.packed) == ("layers.1", "GptOssExperts", False)
    assert dense.conversion == "dense bfloat16"
    assert (dense.weights, dense.bytes, dense.bits_per_weight) == (WEIGHTS, 2 * WEIGHTS, 16)
    assert (report.packed, report.weights, report.bytes) == (False, 2 * WEIGHTS, packed.bytes + dense.bytes)


def test_a_layer_without_a_gate_has_a_third_less(model_of):
    (row,) = packed_report(model_of("packed nemotron_h")).rows
    assert (row.weights, row.bits_per_weight) == (4 * 2 * 64 * 96, 4.25)


@pytest.mark.parametrize("check", [False, True])
def test_table_and_dict_hold_every_row(check, model_of):
    report = packed_report(model_of("packed mixtral", "packed gpt_oss", "nemotron_h"), check=check)
    lines = str(report).splitlines()
    assert ("error" in lines[0]) == check
    for line, row in zip(lines[1:], report.rows, strict=False):
        assert line.split()[:2] == [row.name, row.experts_class]
        assert f"{row.bits_per_weight:.2f}" in line
    assert f"{report.weights:,} expert weights" in str(report)
    assert report.rows[0].reason in str(report)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (plain["packed"], plain["weights"], plain["bytes"]) == (False, report.weights, report.bytes)
    for entry, row in zip(plain["modules"], report.rows, strict=True):
        assert entry["name"] == row.name
        assert entry["bits_per_weight"] == row.bits_per_weight
        assert entry["error"] == row.error


def test_a_model_without_experts_has_an_empty_report():
    report = packed_report(nn.Linear(32, 32))
    assert (report.rows, report.packed, str(report)) == ((), False, "no experts")
    assert report.to_dict() == {"packed": False, "weights": 0, "bytes": 0, "modules": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_check_passes_a_right_backend(family, dtype, model_of):
    (row,) = packed_report(model_of(f"packed {family}", dtype=dtype), check=True).rows
    assert 0 < row.error < 1e-5


def test_check_passes_a_single_expert(stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("mixtral", 1, 32, 32))
    assert packed_report(packed, check=True).rows[0].error < 1e-5


def test_check_of_experts_that_are_all_zero_finds_no_error(stock_experts):
    stock = stock_experts("mixtral")
    for parameter in stock.parameters():
        parameter.data.zero_()
    report = packed_report(MXFP4Experts.from_dense(stock), check=True)
    assert report.rows[0].error == 0
    json.dumps(report.to_dict(), allow_nan=False)


def swapped_nibbles(blocks, scales, out, index):
    return mxfp4.dequantize_into(blocks << 4 | blocks >> 4, scales, out, index)


def scale_one_too_big(blocks, scales, out, index):
    return mxfp4.dequantize_into(blocks, scales + 1, out, index)


def minus_as_plus(blocks, scales, out, index):
    return mxfp4.dequantize_into(blocks & 0x7F, scales, out, index)


@pytest.mark.parametrize("wrong", [swapped_nibbles, scale_one_too_big, minus_as_plus])
@pytest.mark.parametrize("family", FAMILIES)
def test_check_finds_a_wrong_decode(family, wrong, model_of, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    model = model_of(f"packed {family}")
    monkeypatch.setattr(reference, "dequantize_into", wrong)
    assert packed_report(model, check=True).rows[0].error > 0.05


def test_check_finds_a_backend_that_mixes_up_experts(model_of, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    model = model_of("packed mixtral")

    original = reference.grouped_linear

    def mixed_up(x, blocks, scales, *others):
        return original(x, blocks.flip(0), scales.flip(0), *others)

    monkeypatch.setattr(reference, "grouped_linear", mixed_up)
    assert packed_report(model, check=True).rows[0].error > 0.05


@pytest.mark.skipif(unavailable("cpu") is not None, reason="no native kernels")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_check_finds_a_whole_mlp_that_is_wrong(family, model_of, monkeypatch):
    """Where the native kernels run both projections in one call, it is that call that is checked."""
    model = model_of(f"packed {family}")
    original = cpu.experts_mlp

    def mixed_up(x, ids, weights, first, second, *others):
        return original(x, ids, weights, first, (second[0].flip(0), *second[1:]), *others)

    monkeypatch.setattr(cpu, "experts_mlp", mixed_up)
    assert packed_report(model, check=True).rows[0].error > 0.05


def test_checking_changes_nothing(model_of):
    model = model_of("packed gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.random.get_rng_state()
    packed_report(model, check=True)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_assert_packed_passes_a_packed_model(model_of):
    assert_packed(model_of("packed mixtral", "packed gpt_oss"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        pytest.param(["mixtral", "gpt_oss"], r"2 of 2.*layers\.0 .*16 bits.*layers\.1 ", id="all dense"),
        pytest.param(
            ["packed mixtral", "gpt_oss"], r"1 of 2 (?!.*layers\.0).*layers\.1 \(dense bfloat16", id="half packed"
        ),
        pytest.param([], r"Module has no experts", id="no experts"),
    ],
)
def test_assert_packed_names_what_is_not(layers, message, model_of):
    with pytest.raises(NotPackedError, match=message):
        assert_packed(model_of(*layers))
    assert issubclass(NotPackedError, RuntimeError)


def test_bytes_that_were_cast_away_are_not_called_packed(model_of):
    model = model_of("packed mixtral")
    model.layers[0].down_proj_blocks.data = model.layers[0].down_proj_blocks.data.float()
    with pytest.raises(NotPackedError, match=r"layers\.0"):
        assert_packed(model)

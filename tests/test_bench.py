"""`hf-mxfp4 bench`: its output, that nothing wrong is timed, its oracle, and ggml's layout."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from hf_mxfp4 import backends, bench, configs
from hf_mxfp4.bench import ggml, sides, timing
from hf_mxfp4.cli import main

TINY = configs.shape("tiny")
SHAPES = {"qwen3": TINY, "gpt-oss": TINY._replace(activation=sides.CLAMPED_SWIGLU, bias=True)}
QUICK = bench.LayerOptions(tokens=(1,), sides=("hf_mxfp4",), rounds=4, seconds=0.1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def layer(request):
    return sides.random_layer(request.param, torch.Generator().manual_seed(0))


def command(arguments):
    return main(["bench", *arguments.split()])


class Altered(sides.ModuleSide):
    """The reference backend, with one token's results doubled; counts its runs."""

    def __init__(self, layer, token):
        super().__init__("altered", sides.packed_side(layer, "", "reference").module, limit=1e-2)
        self.token, self.runs = token, 0

    def run(self):
        super().run()
        self.runs += 1
        self._output[self.token] *= 2


def test_command_prints_tables_and_writes_json(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert command(f"--shapes tiny --tokens 1 4 --threads 1 2 --rounds 3 --seconds 0.1 --json {file}") == 0
    out = capsys.readouterr().out
    for part in ("tiny: 8 experts, 2 a token, 64 x 64; 1 thread(s)", "2 thread(s)", "x grouped_mm", "x batched_mm",
                 "x 1 thread", "GFLOP/s", "of read, best", "F.linear", "float64"):  # fmt: skip
        assert part in out
    found = json.loads(file.read_text())
    assert [(case["threads"], case["tokens"]) for case in found["cases"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    for case in found["cases"]:
        assert case["operations"] == 2 * case["tokens"] * 2 * 3 * 64 * 64
        for name in ("hf_mxfp4", "grouped_mm", "batched_mm"):
            assert 0 < case["sides"][name]["error"] < 2e-2
            assert 0 < case["sides"][name]["us_best"] <= case["sides"][name]["us_median"]
            assert len(case["sides"][name]["us"]) == 3
    assert found["where"]["torch"] == torch.__version__


def test_sides_that_are_wrong_are_not_timed():
    made = []

    def extra(layer):
        made.append(Altered(layer, token=0))
        return made

    with pytest.raises(RuntimeError, match=r"altered is wrong at 1 tokens: off by 1.0e\+00 from float64"):
        list(bench.measure_layer("tiny", TINY, QUICK, extra))
    assert made[0].runs == 1


def test_tokens_that_are_not_computed_in_float64_are_checked_too(layer, generator):
    check = sides.Check(layer, sides.packed_side(layer, "reference", "reference"), generator)
    with pytest.raises(RuntimeError, match="from the reference backend"):
        check.error(Altered(layer, token=1), 16)  # of 16 tokens, 0, 2, 4, 6, 8, 10, 12 and 15 are in float64


def test_wrong_side_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(timing, "packed_side", lambda layer, name, backend: Altered(layer, 0))
    assert command("--shapes tiny --tokens 1 --threads 1 --sides hf_mxfp4") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_oracle_is_stock_in_float64(layer, decode, generator):
    """The oracle of the benchmark against Transformers' eager code and ml_dtypes' decode."""
    (stock,) = sides.stock_sides(layer, {"eager": None})
    for proj, (blocks, scales) in layer.packed.items():
        weight = decode(blocks, scales)
        is_transposed = layer.shape.activation == sides.CLAMPED_SWIGLU
        stock.module.register_parameter(proj, torch.nn.Parameter(weight.mT if is_transposed else weight, False))
    batch = sides.random_batch(layer.shape, 5, generator)
    stock.module.double()
    stock.load(batch._replace(tokens=batch.tokens.double(), weights=batch.weights.double()))
    stock.run()
    assert sides.relative_error(sides.exact(layer, batch), stock.output()) < 1e-14


def test_ggml_blocks_decode_to_the_same_weights(layer, decode):
    """One layout's bytes against another's, by the package gguf."""
    blocks, scales = layer.packed["down_proj"]
    ours = ggml.ggml_blocks(blocks, scales).flatten(-2).numpy()
    decoded = quants.dequantize(ours, GGMLQuantizationType.MXFP4)
    assert np.array_equal(decoded, decode(blocks, scales).numpy())


@pytest.mark.skipif(ggml.unavailable() is not None, reason=str(ggml.unavailable()))
@pytest.mark.parametrize("repack", [True, False])
def test_llama_cpp_computes_the_layer(layer, repack, generator):
    check = sides.Check(layer, sides.packed_side(layer, "reference", "reference"), generator)
    side = ggml.GgmlSide(layer, "llama.cpp", repack=repack)
    try:
        assert [1e-3 < check.error(side, tokens) < 3e-2 for tokens in (1, 3, 40, 1)] == 4 * [True]
    finally:
        side.close()


def test_without_llama_cpp_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(ggml.importlib.util, "find_spec", lambda name: None)
    assert command("--shapes tiny --tokens 1 --threads 1 --rounds 3 --seconds 0.1") == 0
    out = capsys.readouterr().out
    assert "hf_mxfp4[peers]" in out
    assert "x llama.cpp" not in out


@pytest.mark.skipif(backends.unavailable("cpu") is not None, reason=str(backends.unavailable("cpu")))
def test_machine_is_probed_by_the_native_backend():
    (case,) = bench.measure_layer("tiny", TINY, QUICK)
    for probe in (timing.READ, timing.MULTIPLY):
        assert min(case.series[probe].rates) > 0.1
        assert 0 < case.share(probe, case.flop_rates, max) < 1


def test_ratios_are_of_runs_in_the_same_round():
    ours, slow = timing.Series("ours"), timing.Series("slow")
    ours.seconds = {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}
    slow.seconds = {1: 4.0, 2: 3.0, 3: 2.0}
    assert slow.over(ours) == 2.0
    assert timing.Series("never", seconds={9: 1.0}).over(ours) is None


def test_model_end_to_end(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert command(f"--model tiny --threads 1 --prompt 16 --new 4 --rounds 2 --json {file}") == 0
    assert "prefill" in capsys.readouterr().out
    (speed,) = json.loads(file.read_text())["models"]
    assert 0 < speed["error"] < 2e-2
    for kind in ("prefill", "decode"):
        assert {side: len(rates) for side, rates in speed[kind].items()} == {"packed": 2, "bfloat16": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes gpt-4", "shapes.json has no 'gpt-4'; it has gpt-oss-20b"),
        ("--shapes kimi-k3", "no experts class to compare with for situ experts"),
        ("--tokens 0", "--tokens has 0; expected at least 1"),
        ("--threads 0", "--threads has 0; expected at least 1"),
        ("--rounds 0", "--rounds has 0; expected at least 1"),
        ("--seconds 0", "--seconds is 0.0; expected more than 0"),
        ("--model tiny --new 1", "--new is 1; expected at least 2"),
        ("--json /nonexistent/bench.json", "--json: there is no folder /nonexistent"),
        ("--backend gpu", "backend is 'gpu'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert command(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_forced_backend_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    assert command("--shapes tiny --tokens 1") == 2
    assert "HF_MXFP4_BACKEND is set" in capsys.readouterr().err

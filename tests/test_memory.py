"""Private memory while a bfloat16 checkpoint is quantized on load, by the benchmark's own function on a small model."""

import importlib.util
import weakref
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4.quantizer import conversion

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "load_memory.py"


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("load_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_stays_within_half_a_layers_experts_of_the_end(benchmark, tmp_path):
    sizes = benchmark.Sizes(layers=4, experts=32, hidden=768, intermediate=512)
    figures = benchmark.measure(sizes, tmp_path)
    assert figures.packed_bytes == figures.expert_weights * 17 // 32
    assert figures.peak_bytes - figures.final_bytes <= sizes.layer_bytes / 2
    assert figures.peak_bytes - figures.packed_bytes <= sizes.layer_bytes / 2  # what is kept is the packed bytes


@pytest.mark.parametrize("stacked", [False, True], ids=["a tensor per expert", "a tensor for all"])
def test_memory_stays_within_eleven_tenths_of_an_expert_of_the_end(benchmark, tmp_path, stacked):
    sizes = benchmark.Sizes(layers=2, experts=8, hidden=2048, intermediate=2048)
    figures = benchmark.measure(sizes, tmp_path, stacked=stacked)
    assert figures.packed_bytes == figures.expert_weights * 17 // 32
    # Beside the packed bytes, up to 15 MB of what is not experts and what the interpreter needs for its own.
    assert figures.peak_bytes - figures.final_bytes <= 1.1 * sizes.expert_bytes
    assert figures.peak_bytes - figures.packed_bytes <= 1.1 * sizes.expert_bytes + 15e6


def test_memory_with_all_layers_on_the_disk_is_about_a_layers(benchmark, tmp_path):
    sizes = benchmark.Sizes(layers=6, experts=32, hidden=768, intermediate=512)
    figures = benchmark.measure(sizes, tmp_path, to_disk=True)
    assert figures.packed_bytes == figures.expert_weights * 17 // 32
    # One layer's packed experts, one expert of the next, and what the interpreter needs for its own.
    assert figures.peak_bytes <= figures.packed_bytes / sizes.layers + 50e6
    assert figures.peak_bytes < figures.packed_bytes


def test_no_more_than_one_experts_tensors_are_held_at_a_time(monkeypatch):
    """On any device: what the loader reads it reads to the device of the parameter, and this is when it reads."""
    alive, most, original = weakref.WeakSet(), [0], conversion.read

    def read(item):
        tensor = original(item)
        alive.add(tensor)
        most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(conversion, "read", read)
    config = hf_mxfp4.MXFP4Config()
    AutoModelForCausalLM.from_pretrained(hf_mxfp4.demo_model_path(), quantization_config=config)
    assert 1 <= most[0] <= 3  # gate and up of one expert, and one that is on its way out

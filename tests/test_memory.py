"""Private memory while a bfloat16 checkpoint is quantized on load, by the benchmark's own function on a small model."""

import importlib.util
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "load_memory.py"


def test_memory_stays_within_half_a_layers_experts_of_the_end(tmp_path):
    spec = importlib.util.spec_from_file_location("load_memory", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    sizes = benchmark.Sizes(layers=4, experts=32, hidden=768, intermediate=512)
    figures = benchmark.measure(sizes, tmp_path)
    assert figures.packed_bytes == figures.expert_weights * 17 // 32
    assert figures.peak_bytes - figures.final_bytes <= sizes.layer_bytes / 2
    assert figures.peak_bytes - figures.packed_bytes <= sizes.layer_bytes / 2  # what is kept is the packed bytes

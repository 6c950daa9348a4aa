"""Private memory while a bfloat16 checkpoint is quantized on load, by the benchmark's own function on a small model."""

import importlib.util
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "load_memory.py"


def test_memory_stays_within_half_a_layers_experts_of_the_end(tmp_path):
    spec = importlib.util.spec_from_file_location("load_memory", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    figures = benchmark.measure(benchmark.Sizes(layers=4, experts=32, hidden=768, intermediate=512), tmp_path)
    print(figures)

"""Private memory while a bfloat16 checkpoint is quantized on load, by the benchmark's own function on a small model."""

import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are alive, as an accelerator's allocator does."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage not in self.known and id(storage) not in given:
                    self.known.add(storage)
                    self.change(storage.nbytes())
                    weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)


def test_on_a_device_an_expert_and_what_is_kept_are_all_that_is_allocated(benchmark, tmp_path, monkeypatch):
    """What is read is copied, as a device would have it, and every allocation of the conversion is counted."""
    original = conversion.read
    monkeypatch.setattr(conversion, "read", lambda item: original(item).clone())
    sizes = benchmark.Sizes(layers=1, experts=6, hidden=2048, intermediate=2048)
    benchmark.write_checkpoint(tmp_path, sizes)
    with Allocations() as allocations:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hf_mxfp4.MXFP4Config())
    packed = hf_mxfp4.packed_report(model).bytes
    assert allocations.peak >= packed + sizes.expert_bytes / 3  # the counter sees both
    assert allocations.peak - allocations.now <= 1.1 * sizes.expert_bytes

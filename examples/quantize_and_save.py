"""Quantizes a model as it loads, saves it packed, loads the folder again, and compares every packed byte.

The saved folder says itself that it is packed: with `import hf_mxfp4` no config is passed to load it.
Run: python examples/quantize_and_save.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Config, MXFP4Experts, assert_packed, demo_model_path


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), quantization_config=MXFP4Config())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        again = AutoModelForCausalLM.from_pretrained(folder)
    assert_packed(again)

    before = (Path(demo_model_path()) / "model.safetensors").stat().st_size
    print(f"file: {before:,} bytes in bfloat16, {size:,} packed")
    compared = 0
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Experts):
            for proj in module.projection_names:
                for ours, theirs in zip(module.packed(proj), again.get_submodule(name).packed(proj), strict=True):
                    assert torch.equal(ours, theirs), f"{name}.{proj} changed on the way through the file"
                    compared += ours.numel()
    print(f"{compared:,} packed bytes are equal after save and reload")


if __name__ == "__main__":
    main()

"""Splits a model between memory and disk by the bytes that its packed experts take, and runs it like that.

`max_memory` decides, as for any model; in bfloat16 less of this one would fit. Experts on disk stay packed there, and
each forward reads those that it needs. Run: python examples/device_map.py
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4Config, assert_packed, demo_model_path


def main() -> None:
    path = demo_model_path()
    whole = AutoModelForCausalLM.from_pretrained(path, quantization_config=MXFP4Config())
    limit = whole.get_memory_footprint() * 7 // 8
    prompt = AutoTokenizer.from_pretrained(path)("The king is", return_tensors="pt")
    expected = whole.generate(**prompt, max_new_tokens=8, do_sample=False)

    for config in (MXFP4Config(), None):
        with tempfile.TemporaryDirectory() as folder:
            options = {"device_map": "auto", "max_memory": {"cpu": limit}, "offload_folder": folder}
            model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)
            in_memory = [name for name, device in model.hf_device_map.items() if device == "cpu"]
            print("in MXFP4:" if config else "in bfloat16:", ", ".join(in_memory) or "nothing", "in memory")
            if config:
                assert_packed(model)
                assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), expected)
                print("the tokens are those of the whole model in memory")


if __name__ == "__main__":
    main()

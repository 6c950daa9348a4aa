"""Runs a model whose experts stay on disk: each token reads those that its router picked, and hot ones stay in memory.

Uses the small model that the package ships. Run: python examples/streaming.py
"""

from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4Config, MXFP4Experts, demo_model_path

PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}


def main() -> None:
    path = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = MXFP4Config(expert_cache_bytes=80_000)  # of 156,672: about half of the experts
    with TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=config, device_map={**PLACES, "model.layers": "disk"}, offload_folder=folder
        )
        prompt = tokenizer("MACBETH.\nIs this a dagger", return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        print("generated:", tokenizer.decode(tokens[0]))
        hooks = [module._hf_hook for module in model.modules() if isinstance(module, MXFP4Experts)]
        read, hit = sum(hook.reads for hook in hooks), sum(hook.hits for hook in hooks)
        print(f"{len(hooks)} layers kept at most {hooks[0].count} experts each in memory")
        print(f"{hit} of {hit + read} experts that were needed were in memory, {read} were read from disk")


if __name__ == "__main__":
    main()

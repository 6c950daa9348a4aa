"""Makes a tiny random gpt-oss model, packs it as it loads, and saves it as the Hub's gpt-oss checkpoints are laid out.

The file then holds 4-D `_blocks` and 3-D `_scales`, which Transformers' own MXFP4 loader reads back to the same
weights. Run: python examples/gpt_oss_layout.py
"""

import tempfile

import torch
from safetensors import safe_open
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from hf_mxfp4 import MXFP4Config


def main() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, pad_token_id=0)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as dense, tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(dense)
        packed = GptOssForCausalLM.from_pretrained(dense, quantization_config=MXFP4Config())
        packed.save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            for name in (key for key in file.keys() if "layers.0.mlp.experts" in key):  # noqa: SIM118
                stored = file.get_slice(name)
                print(f"{name:42} {stored.get_dtype():4} {stored.get_shape()}")
        stock = GptOssForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))

    for ours, theirs in zip(packed.model.layers, stock.model.layers, strict=True):
        for proj in ("gate_up_proj", "down_proj"):
            decoded = ours.mlp.experts.packed(proj).dequantize(torch.bfloat16).mT  # the stock class holds [E, in, out]
            assert torch.equal(decoded, getattr(theirs.mlp.experts, proj)), proj
    print("Transformers' own reader decodes the file to the same weights")


if __name__ == "__main__":
    main()

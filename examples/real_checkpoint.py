"""Runs a published MoE model with its experts in MXFP4. Needs a network, and is not run by the tests.

    python examples/real_checkpoint.py openai/gpt-oss-20b      packed on the Hub, kept byte for byte, about 14 GB
    python examples/real_checkpoint.py Qwen/Qwen3-30B-A3B      bfloat16 on the Hub, quantized as it loads, about 61 GB

The sizes are of the download; in memory the experts take 4.25 bits a weight.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4Config, assert_packed, packed_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="id on the Hub, or a folder")
    parser.add_argument("--prompt", default="Why do mixture-of-experts models fit small formats well?")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()

    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=MXFP4Config(), device_map="auto")
    assert_packed(model)
    print(packed_report(model), f"\nloaded in {time.perf_counter() - start:.0f} s")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**inputs.to(model.device), max_new_tokens=args.tokens)
    print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()

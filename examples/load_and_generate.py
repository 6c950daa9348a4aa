"""Loads a dense MoE model with its experts in MXFP4, proves that they are packed, and writes a few tokens.

Uses the small model that the package ships, so nothing is downloaded. Run: python examples/load_and_generate.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4Config, assert_packed, demo_model_path, packed_report


def main() -> None:
    path = demo_model_path()  # or the id of any MoE model that Transformers knows, in bfloat16 or already in MXFP4
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MXFP4Config())
    tokenizer = AutoTokenizer.from_pretrained(path)

    assert_packed(model)  # raises, with their names, if any experts are not in MXFP4
    print(packed_report(model, check=True))

    prompt = tokenizer("MACBETH.\nIs this a dagger", return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    print("\ngenerated:", tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    main()

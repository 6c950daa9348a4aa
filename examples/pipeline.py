"""Runs a text-generation pipeline from a folder that holds a model with packed experts.

`import hf_mxfp4` is all that the pipeline needs: it is given the folder and nothing else.
Run: python examples/pipeline.py
"""

import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_mxfp4 import MXFP4Config, assert_packed, demo_model_path


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = demo_model_path()
        AutoModelForCausalLM.from_pretrained(path, quantization_config=MXFP4Config()).save_pretrained(folder)
        AutoTokenizer.from_pretrained(path).save_pretrained(folder)

        writer = pipeline("text-generation", model=folder)
        assert_packed(writer.model)
        for prompt in ("ROMEO.\nBut soft", "The king is"):
            text = writer(prompt, max_new_tokens=16, do_sample=False)[0]["generated_text"]
            print(f"--- {prompt!r}\n{text}")
    print("--- the pipeline ran on packed experts")


if __name__ == "__main__":
    main()

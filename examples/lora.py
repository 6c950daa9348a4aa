"""Trains LoRA adapters on attention and on the experts themselves, which stay packed, then merges them.

Uses the small model that the package ships and its text. Needs `pip install peft`. Run: python examples/lora.py
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4Config, assert_packed, demo_model_path, packed_report


def main() -> None:
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=MXFP4Config())
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # the names that the dense model has
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=experts))
    model.print_trainable_parameters()

    text = (Path(path) / "held-out.txt").read_text(encoding="utf-8")[:4000]
    batch = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[:, :1024].view(8, 128)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for step in range(20):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.2f}")

    merged = model.merge_and_unload()  # rounds what it merges to MXFP4 again, and says what that cost
    assert_packed(merged)
    print(packed_report(merged))
    print(f"merged: loss {merged(batch, labels=batch).loss.item():.2f}")


if __name__ == "__main__":
    main()

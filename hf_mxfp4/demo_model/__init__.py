"""A Qwen3-MoE of 0.4 M parameters trained on public-domain plays, its tokenizer, and held-out text of the same kind."""

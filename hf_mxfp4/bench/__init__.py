"""What `hf-mxfp4 bench` measures: one MoE layer beside its peers, and whole models.

sides.py    a layer, the sides that compute it from the same bytes, and what their results are compared with
ggml.py     llama.cpp as a side
timing.py   what the machine can do, and the interleaved runs
model.py    end to end: tokens a second of `generate`
"""

from __future__ import annotations

from .model import ModelSpeed, measure_model
from .timing import Case, LayerOptions, Machine, measure_layer, where

__all__ = ["Case", "LayerOptions", "Machine", "ModelSpeed", "measure_layer", "measure_model", "where"]

"""hf_mxfp4: the experts of Mixture-of-Experts models in Hugging Face Transformers, kept and run in MXFP4."""

from __future__ import annotations

from pathlib import Path

from .experts import MXFP4Experts
from .formats import CheckpointError
from .mxfp4 import MXFP4Tensor, dequantize
from .ops import mxfp4_expert_linear, quantize
from .quantizer import MXFP4Config, MXFP4HfQuantizer, disable, enable, stream_experts
from .report import NotPackedError, PackedReport, assert_packed, packed_report

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "MXFP4Config",
    "MXFP4Experts",
    "MXFP4HfQuantizer",
    "MXFP4Tensor",
    "NotPackedError",
    "PackedReport",
    "__version__",
    "assert_packed",
    "demo_model_path",
    "dequantize",
    "disable",
    "enable",
    "mxfp4_expert_linear",
    "packed_report",
    "quantize",
    "stream_experts",
]


def demo_model_path() -> str:
    """The folder of the small trained MoE that the package ships: a Qwen3-MoE of 0.4 M parameters, in bfloat16."""
    return str(Path(__file__).parent / "demo_model")

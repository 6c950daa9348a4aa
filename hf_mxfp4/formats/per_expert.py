"""One pair of tensors for each matrix of each expert, as compressed-tensors writes `mxfp4-pack-quantized`.

    {experts}.{e}.{proj}.weight_packed   uint8 [N, K / 2], low nibble first
    {experts}.{e}.{proj}.weight_scale    uint8 [N, K / 32], biased by 127

{proj} goes by the model's own names for one expert's matrices (gate_proj, up_proj, down_proj; w1, w3, w2). How they
stack into the model's 3-D projections is the model's own conversion, which knows rows and not bytes.
"""

from __future__ import annotations

from typing import Any

from ..mxfp4 import BLOCK_SIZE, canonical
from .base import Dialect

FORMAT = "mxfp4-pack-quantized"
COMPRESSED_TENSORS = Dialect("compressed-tensors", "per expert", ".weight_packed", ".weight_scale", 2, canonical)


def config() -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose routed experts, and nothing else, are in this dialect."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "format": FORMAT,
        "targets": [r"re:.*\.experts\.\d+\..*"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }

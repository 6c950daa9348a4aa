"""The ops in plain torch, on any device: the oracle for the other backends and the path of last resort.

One expert at a time is decoded, used and dropped, so the working memory is one expert's weights. E experts, N output
features, K input features, S rows sorted by expert.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..mxfp4 import dequantize


def grouped_linear(x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool) -> Tensor:
    """Multiplies each expert's rows by its weights, or by their transpose.

    Args:
        x: float32 or float64 [S, K], or [S, N] with `transpose`; rows sorted by expert.
        blocks: uint8 [E, N, K / 2]. May be on another device than `x`: only experts that own rows are moved.
        scales: uint8 [E, N, K / 32], beside `blocks`.
        offsets: int64 [E + 1], expert e owns rows offsets[e] to offsets[e + 1].
        transpose: multiply by the weights [N, K] as they are (the gradient), not by their transpose [K, N].

    Returns:
        [S, N], or [S, K] with `transpose`, in the dtype of `x`; zeros in rows past offsets[E].
    """
    width = 2 * blocks.shape[2] if transpose else blocks.shape[1]
    bounds = offsets.tolist()
    out = x.new_empty(x.shape[0], width)
    out[bounds[-1] :].zero_()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            weight = dequantize(blocks[expert].to(x.device), scales[expert].to(x.device), x.dtype)
            torch.mm(x[start:stop], weight if transpose else weight.t(), out=out[start:stop])
    return out

"""MXFP4Linear: one linear layer of one expert, held packed, for models whose experts are a list of small MLPs.

Such models come with code of their own, which calls each expert's layers one by one; so each layer is replaced and the
code stays as it is. N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import mxfp4, ops
from .packed import PackedModule


class MXFP4Linear(PackedModule):
    """A linear layer whose weight is packed: `weight_blocks` uint8 [N, K / 2], `weight_scales` uint8 [N, K / 32]."""

    projection_names = ("weight",)
    bias: nn.Parameter | None

    def __init__(
        self, linear: nn.Linear, *, name: str = "linear", backend: str = "auto", activation: str = "auto"
    ) -> None:
        """Takes the place of `linear`: its bias, and room for its packed weight.

        Args:
            linear: the layer, on any device, also meta. Left as it is.
            name: what errors call it.
            backend: see `backends.choose`.
            activation: "int8" rounds inputs to 8 bits before they are multiplied; "auto" keeps what they have.

        Raises:
            ValueError: an input width that is no multiple of 32.
        """
        super().__init__()
        self._pack_init(nn.Linear, linear.weight.dtype, backend, activation)
        self.training = linear.training
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._make_room("weight", tuple(linear.weight.shape), f"{name}.weight", linear.weight.device)
        bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        self.register_parameter("bias", bias)

    weight = property(lambda self: self._stand_in("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, summed in float32 (float64 for float64 inputs).

        Args:
            x: floating point [..., K].

        Returns:
            [..., N] in the dtype of `x`.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x {list(x.shape)} does not fit a layer of width {self.in_features}")
        compute = torch.promote_types(x.dtype, torch.float32)
        rows = x.reshape(-1, self.in_features).to(compute)
        offsets = torch.arange(2, device=x.device) * rows.shape[0]
        blocks, scales = (self.get_parameter(f"weight_{part}").unsqueeze(0) for part in ("blocks", "scales"))
        backend, operand = self.backend(x.device.type), self.operand(x.dtype)
        narrow = backend == "triton" and self.is_narrow()
        out = ops.grouped_linear(rows, blocks, scales, offsets, operand=operand, narrow=narrow, backend=backend)
        if self.bias is not None:
            out = out + self.bias.to(compute)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """The stock layer with the weight decoded.

        Args:
            dtype: of weight and bias; by default what they had, or what this module was cast to.

        Returns:
            A linear layer on the same device.

        Raises:
            ValueError: packed bytes that are not here, as when they are offloaded.
        """
        blocks, scales = self.packed_here("weight")
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(mxfp4.dequantize(blocks, scales, dtype or self.dense_dtype))
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone().to(dtype or self.bias.dtype))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        """One line for printed models."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

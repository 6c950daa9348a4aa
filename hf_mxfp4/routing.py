"""From the router's top-k ids to slots sorted by expert, and back.

T tokens, k experts a token, S = T * k slots; slot t * k + j is token t's j-th choice. E experts. Every shape here
follows from the shapes that come in, never from their values, and nothing asks the device for a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Slots sorted by expert.

    Attributes:
        order: int64 [S], the slot at each sorted position; the slots of one expert keep their order.
        offsets: int64 [E + 1], expert e owns sorted positions offsets[e] to offsets[e + 1]. Slots whose id is no
            expert's stand at the end, from offsets[E] on.
        experts: int64 [S], the expert at each sorted position; E where the id is no expert's.
        valid: bool [T, k], whether the id is an expert's.
    """

    order: Tensor
    offsets: Tensor
    experts: Tensor
    valid: Tensor


_TOKEN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(tokens: Tensor, ids: Tensor, weights: Tensor, names: tuple[str, str, str]) -> None:
    """Raises unless tokens [T, K], ids [T, k] and weights [T, k] fit each other.

    Args:
        tokens: float16, bfloat16, float32 or float64.
        ids: integer.
        weights: floating point.
        names: what errors call the three.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: a shape that does not fit.
    """
    if tokens.dtype not in _TOKEN_DTYPES:
        raise TypeError(f"{names[0]} has dtype {tokens.dtype}; expected a floating point dtype of 16 bits or more")
    if not weights.is_floating_point():
        raise TypeError(f"{names[2]} has dtype {weights.dtype}; expected a floating point dtype")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TypeError(f"{names[1]} has dtype {ids.dtype}; expected an integer dtype")
    if tokens.ndim != 2:
        raise ValueError(f"{names[0]} {list(tokens.shape)}: expected [T, K]")
    if ids.ndim != 2 or ids.shape[0] != tokens.shape[0]:
        raise ValueError(f"{names[1]} {list(ids.shape)} do not fit {tokens.shape[0]} {names[0]}: expected [T, k]")
    if weights.shape != ids.shape:
        raise ValueError(f"{names[2]} {list(weights.shape)} do not fit {names[1]} {list(ids.shape)}")


def plan(top_k_index: Tensor, num_experts: int) -> Plan:
    """Sorts slots by expert.

    Args:
        top_k_index: integer [T, k]. Ids outside 0 to E - 1 (padding, routes of other ranks) belong to no expert.
        num_experts: E.

    Returns:
        The plan for all S slots.
    """
    ids = top_k_index.long()
    valid = (ids >= 0) & (ids < num_experts)
    experts, order = torch.sort(torch.where(valid, ids, num_experts).flatten(), stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    return Plan(order, torch.searchsorted(experts, bounds), experts, valid)


def gather(tokens: Tensor, slots: Plan) -> Tensor:
    """The token of each sorted position, [S, K], from `tokens` [T, K]."""
    return tokens[slots.order // max(slots.valid.shape[-1], 1)]


def combine(outputs: Tensor, slots: Plan, weights: Tensor) -> Tensor:
    """The weighted sum over each token's experts, in a fixed order.

    Args:
        outputs: [S, N], rows by sorted position. Rows of slots that belong to no expert are not read.
        slots: the plan that sorted them.
        weights: [T, k], used as they are.

    Returns:
        [T, N] in the wider of both dtypes.
    """
    position = torch.empty_like(slots.order).scatter_(
        0, slots.order, torch.arange(slots.order.numel(), device=slots.order.device)
    )
    by_token = outputs[position].view(*slots.valid.shape, outputs.shape[-1])
    valid = slots.valid.unsqueeze(-1)
    # Masked before the product, so that neither a stray value nor a stray gradient comes through as NaN.
    return (by_token.masked_fill(~valid, 0) * weights.unsqueeze(-1).masked_fill(~valid, 0)).sum(dim=1)

"""What a tensor is for, by its name: those of Transformers' classes, of models with code of their own, and of GGUF.

A name is one of the first kind that has a pattern for it. `layers.3.self_attn.q_norm.weight` is a norm before it is
attention, `mlp.shared_experts.gate_proj.weight` one of the shared experts before it is an MLP.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..formats import is_activation_scale, is_expert

EXPERTS = "experts"
EXPERT_BIASES = "experts' biases"
ACTIVATION_SCALES = "activation scales"
OTHER = "other"

_PATTERNS = (
    (OTHER, r"(?:^|[._])(?:vision|visual|audio|image|mm_projector|multi_modal_projector)|res_proj\."),
    ("shared experts", r"shared_(?:experts?|mlp|head_ffn)|_shexp\."),
    ("norms", r"norm\d*(?:\.(?:weight|bias|scale))?$|(?:^|\.)ln_?\w*\.(?:weight|bias)$"),
    ("attention", r"attn|attention|mamba|ssm_|mixer\.(?:[qkvo]_proj|in_proj|out_proj|conv1d|A_log|D$|dt_bias)"),
    ("router", r"(?:^|\.)(?:gate|wg|router\w*)\.|router$|ffn_gate_inp|exp_probs_b|e_score_correction"),
    ("latent projections", r"routed_expert_(?:down|up)_proj|fc\d_latent_proj"),
    ("embeddings and head", r"embed|\bwte\b|lm_head|(?:^|\.)head\.|^output\.|token_embd|unembedding"),
    ("dense MLP", r"mlp|ffn|feed_forward|mixer\.(?:up|down)_proj"),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
_STACKED_BESIDE_NAMES = re.compile(
    r"\.experts\.|block_sparse_moe\.(?:input|output)_linear|ffn_(?:gate|up|down|gate_up)_exps\."
)
_MODULE = re.compile(
    r"(?P<module>(?:.*\.)?(?:experts?|switch_mlp)|.*\.mlp|blk\.\d+|.*block_sparse_moe)(?:\.(?P<expert>\d+))?\."
)

KINDS = (
    EXPERTS,
    EXPERT_BIASES,
    *(kind for kind, _ in _PATTERNS if kind != OTHER),
    ACTIVATION_SCALES,
    OTHER,
)
"""Every kind, in the order of tables."""


class Place(NamedTuple):
    """Where a tensor of routed experts stands: the module of all of a layer's, and which expert; None for all."""

    module: str
    expert: int | None


def kind_of(name: str) -> str:
    """One of `KINDS`."""
    if is_activation_scale(name):
        return ACTIVATION_SCALES
    if is_expert(name) or _STACKED_BESIDE_NAMES.search(name):
        return EXPERT_BIASES if name.endswith("bias") else EXPERTS
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def place_of(name: str) -> Place | None:
    """Where a tensor of the kind `EXPERTS` stands; None for a name that does not say it."""
    match = _MODULE.match(name)
    if match is None:
        return None
    return Place(match["module"], None if match["expert"] is None else int(match["expert"]))

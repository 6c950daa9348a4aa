"""OpenAI's own names for the parts of gpt-oss beside its experts, as `original/` has them, in Transformers' names.

block.{n}.attn.qkv.{weight, bias}   queries, keys and values one below the other
the rest                            a name for a name
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from .task import KeepStack, first

_RENAMINGS = {
    r"^block\.(\d+)\.": r"model.layers.\1.",
    r"^embedding\.weight$": "model.embed_tokens.weight",
    r"^unembedding\.weight$": "lm_head.weight",
    r"^norm\.scale$": "model.norm.weight",
    r"\.attn\.norm\.scale$": ".input_layernorm.weight",
    r"\.mlp\.norm\.scale$": ".post_attention_layernorm.weight",
    r"\.mlp\.gate\.": ".mlp.router.",
    r"\.attn\.out\.": ".self_attn.o_proj.",
    r"\.attn\.sinks$": ".self_attn.sinks",
}
"""In this order: every one that fits a name is applied to it."""


class SplitHeads(ConversionOps):  # type: ignore[misc]  # Transformers has no type marker
    """Queries, keys and values from one tensor, by the numbers of heads in the model's config."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Three tensors, in the order of the targets."""
        config = kwargs["config"] if kwargs.get("config") is not None else kwargs["model"].config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        sizes = [heads * config.head_dim, groups * config.head_dim, groups * config.head_dim]
        parts = first(input_dict).split(sizes)
        return {name: part.contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """None is needed: nothing is saved under these names."""
        return KeepStack()


def conversions() -> list[WeightTransform]:
    """What a load needs beside the conversions of experts."""
    made: list[WeightTransform] = [WeightRenaming(source, target) for source, target in _RENAMINGS.items()]
    for kind in ("weight", "bias"):
        targets = [rf".self_attn.{part}_proj.{kind}" for part in "qkv"]
        made.append(WeightConverter([rf"\.attn\.qkv\.{kind}$"], targets, [SplitHeads()]))
    return made

"""The memory that a model takes when this package has loaded it and it runs, from its tensors and its config.

N tokens of context, B sequences, T = N * B tokens at once (the whole prompt), k experts a token, S = T * k slots;
H input and output features of an expert, I features between its two projections. In bytes:

    experts      W / 2 of codes and W / 32 of scales for W weights, whatever the file has them in
    the rest     as stored; what is stored in fewer bits is decoded to the model's dtype
    KV cache     2 B (keys + values) for each token that a layer keeps, bfloat16
                 keys + values = heads * (head_dim + v_head_dim), or kv_lora_rank + qk_rope_head_dim where the config
                 has a kv_lora_rank, since Transformers' classes keep what both are made from
                 a layer keeps N tokens, or as many as its window has; one with linear attention keeps no tokens but
                 B states in float32
    workspace    what a forward of one layer's experts allocates beside its output, for bfloat16 tokens and a gate
                   cpu        s (8 H + 4 I) at most, s = min(S, as many as take 4 H each of `_CPU_ROOM`): the rest after
                   triton     2 T H + S (4 H + 2 I)
                   reference  4 S max(H + 2 I, 4 I, H + 3 I, 4 H)

The first two are exact, the others estimates: activations of other layers, logits and allocators' slack come on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..formats import CheckpointError
from ..mxfp4 import BLOCK_SIZE
from .kinds import ACTIVATION_SCALES, EXPERTS
from .tables import size, table
from .tensors import Inventory

_CPU_ROOM = 256 << 20
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_AS_STORED = ("BF16", "F16", "F32", "F64", "BOOL", "I16", "I32", "I64", "U16", "U32", "U64")

# What settings are called. Of several, the first that is there.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")
_HIDDEN = ("routed_expert_hidden_size", "moe_latent_size", "hidden_size")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
_GGUF = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
}


@dataclass(frozen=True)
class Budget:
    """Bytes by what they are for. `str()` is a table, `to_dict()` is ready for JSON.

    Attributes:
        context: N, tokens of each sequence.
        batch: B, sequences.
        payload: the experts' codes.
        scales: the experts' scales.
        rest: all other weights.
        kv_cache: None if the config does not say enough.
        kv_formula: the numbers that it comes from, in words.
        workspace: of one layer's experts by backend; empty if the config does not say enough.
    """

    context: int
    batch: int
    payload: int
    scales: int
    rest: int
    kv_cache: int | None
    kv_formula: str
    workspace: Mapping[str, int]

    @property
    def weights(self) -> int:
        """All weights."""
        return self.payload + self.scales + self.rest

    @property
    def total(self) -> dict[str, int]:
        """Everything that is known, by backend."""
        known = self.weights + (self.kv_cache or 0)
        return {backend: known + space for backend, space in self.workspace.items()} or {"any": known}

    def to_dict(self) -> dict[str, Any]:
        """The budget in plain types."""
        return {**vars(self), "workspace": dict(self.workspace), "weights": self.weights, "total": self.total}

    def __str__(self) -> str:
        """A line for each part and one for each total."""
        kv = "-" if self.kv_cache is None else size(self.kv_cache)
        lines = [
            ["memory", "size", ""],
            ["experts, codes", size(self.payload), "exact"],
            ["experts, scales", size(self.scales), "exact"],
            ["other weights", size(self.rest), "as stored; decoded where stored in fewer bits"],
            ["KV cache", kv, f"estimate: {self.kv_formula}"],
        ]
        tokens = f"estimate: one layer's experts, {self.context * self.batch:,} tokens at once"
        lines += [[f"workspace, {backend}", size(space), tokens] for backend, space in self.workspace.items()]
        lines += [[f"total, {backend}", size(total), "estimate"] for backend, total in self.total.items()]
        return f"{self.batch} x {self.context:,} tokens\n" + table(lines, (1,))


def budget(inventory: Inventory, context: int, batch: int) -> Budget:
    """The memory that a checkpoint's model takes, see above.

    Args:
        inventory: of the checkpoint.
        context: N, at least 1.
        batch: B, at least 1.

    Raises:
        CheckpointError: an index without its files, which says nothing of shapes.
        ValueError: a context or a batch below 1.
    """
    if inventory.names_only:
        raise CheckpointError(f"{inventory.path} holds an index and not the files that it lists: sizes are not known")
    if context < 1 or batch < 1:
        raise ValueError(f"context {context} and batch {batch}: both are at least 1")
    known = settings(inventory.config)
    packed = sum(row.weights for row in inventory.rows if row.kind == EXPERTS)
    width = _DTYPES.get(str(known.get("dtype") or known.get("torch_dtype")).removeprefix("torch."), 2)
    rest = 0
    for row in inventory.rows:
        if row.kind not in (EXPERTS, ACTIVATION_SCALES) and row.part != "scales":
            rest += row.bytes if row.format in _AS_STORED else width * row.weights
    kv, formula = kv_cache(known, context, batch)
    space = workspace(known, context * batch) if packed else {}
    return Budget(context, batch, packed // 2, packed // BLOCK_SIZE, rest, kv, formula, space)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of the language model, with the defaults of its class where Transformers knows it.

    Args:
        config: of config.json, or the metadata of a GGUF file.
    """
    if "general.architecture" in config:
        values = {name: config.get(f"{config['general.architecture']}.{key}") for name, key in _GGUF.items()}
        return {name: value for name, value in values.items() if value is not None}
    text = config.get("text_config")
    own = dict(text if isinstance(text, Mapping) else config)
    return {**own, **_filled(own)}


def kv_cache(known: Mapping[str, Any], context: int, batch: int) -> tuple[int | None, str]:
    """Bytes of the KV cache, None if that is not said, and the numbers that they come from, in words.

    Args:
        known: of `settings`.
        context: N.
        batch: B.
    """
    layers, heads = _number(known, "num_hidden_layers"), _number(known, "num_attention_heads")
    if not layers or not heads:
        return None, "the config does not say how many layers and heads there are"
    rank = _number(known, "kv_lora_rank")
    if rank:
        rope = _number(known, "qk_rope_head_dim") or 0
        wide, words = rank + rope, f"a latent of {rank} + {rope}"
    else:
        keys = _number(known, "head_dim") or (_number(known, "hidden_size") or 0) // heads
        values, heads = _number(known, "v_head_dim") or keys, _number(known, "num_key_value_heads") or heads
        wide, words = heads * (keys + values), f"{heads} heads of {keys} + {values}"
    kept, linear = _kept(known, layers, context)
    total = 2 * batch * wide * sum(tokens * count for tokens, count in kept.items())
    spans = " and ".join(f"{count} layers of {tokens:,} tokens" for tokens, count in sorted(kept.items(), reverse=True))
    formula = f"{spans or 'no layers'}, {words}, 2 bytes"
    if linear:
        state = next((_product(known, names) for names in _STATES if _product(known, names)), 0)
        total += 4 * batch * state * linear
        formula += f"; {linear} layers with a state of " + (
            f"{state:,} x 4 bytes" if state else "a size not known, left out"
        )
    return total, formula


def workspace(known: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """Bytes that the forward of one layer's experts allocates, by backend; empty if shapes are not said.

    Args:
        known: of `settings`.
        tokens: T.
    """
    top_k, hidden, inner = (_number(known, *names) for names in (_TOP_K, _HIDDEN, _INTERMEDIATE))
    if not top_k or not hidden or not inner:
        return {}
    slots = tokens * top_k
    at_once = min(slots, top_k * max(1, _CPU_ROOM // (4 * top_k * hidden)))
    return {
        "cpu": at_once * (8 * hidden + 4 * inner),
        "triton": 2 * tokens * hidden + slots * (4 * hidden + 2 * inner),
        "reference": 4 * slots * max(hidden + 2 * inner, 4 * inner, hidden + 3 * inner, 4 * hidden),
    }


def _filled(own: dict[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its class; empty if Transformers does not know it, or does not take it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if own.get("model_type") not in CONFIG_MAPPING:
        return {}
    try:
        filled: dict[str, Any] = CONFIG_MAPPING[own["model_type"]].from_dict(own).to_dict()
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError):
        return {}
    return filled


def _kept(known: Mapping[str, Any], layers: int, context: int) -> tuple[Counter[int], int]:
    """How many layers keep how many tokens, and how many keep a state instead."""
    kept: Counter[int] = Counter()
    linear = 0
    window, chunk = _number(known, "sliding_window"), _number(known, "attention_chunk_size")
    for kind in _layer_types(known, layers, window):
        if kind in ("moe", "mlp"):
            continue
        if kind.startswith(("linear", "mamba", "recurrent")):
            linear += 1
        elif kind.startswith("sliding") and window:
            kept[min(context, window)] += 1
        elif kind.startswith("chunked") and chunk:
            kept[min(context, chunk)] += 1
        else:
            kept[context] += 1
    return kept, linear


def _layer_types(known: Mapping[str, Any], layers: int, window: int | None) -> list[str]:
    """What each layer attends by, as Transformers' configs call it."""
    types = known.get("layer_types") or known.get("layers_block_type")
    if isinstance(types, list):
        return [str(kind) for kind in types]
    linear = known.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), list):  # counted from 1
        return ["linear" if i + 1 in linear["kda_layers"] else "full" for i in range(layers)]
    return ["sliding" if window and known.get("use_sliding_window") is not False else "full"] * layers


def _number(known: Mapping[str, Any], *names: str) -> int | None:
    """The first of these settings that is a number, or the most of a list of them."""
    for name in names:
        value = known.get(name)
        entries = value if isinstance(value, list) else [value]
        if entries and all(isinstance(entry, int) for entry in entries):
            return int(max(entries))
    return None


def _product(known: Mapping[str, Any], names: tuple[str, ...]) -> int:
    product = 1
    for name in names:
        product *= _number(known, name) or 0
    return product

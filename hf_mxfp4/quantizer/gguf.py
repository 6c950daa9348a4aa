"""GGUF files and Transformers' models: names, configs and tensors, for reading and for writing.

llama.cpp's names are told from a model's by Transformers' own GGUF loader and by the package `gguf`. Experts go another
way: the loader would decode them to floats. Tensors [E, N, K] of experts get the name of their module and

    gate_proj, up_proj, down_proj         as `{proj}_blocks` and `{proj}_scales` if MXFP4
    the same with _q4_k, _nvfp4           bytes as they stand in the file
    the same with nothing more            floats
    the same with _bias, _nvfp4_scale     F32 [E, N] and [E], the latter ones where the file has none

Gates and ups that a file has in one tensor are taken apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.core_model_loading import WeightTransform
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..experts import find_experts
from ..formats import CheckpointError
from ..formats import gguf as layout
from ..formats.gguf import Entry, GGUFHeader, GGUFTensor
from ..mxfp4 import MXFP4Tensor

try:
    from transformers.integrations.gguf import utils as _newer
except ImportError:  # before 5.2x
    _newer = None

_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.value_length": "head_dim",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
_YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


class Architecture(NamedTuple):
    """What llama.cpp knows of a family of models.

    Attributes:
        model_type: what Transformers calls it.
        keys: the attributes of its config by the keys in a file, less the architecture's name.
        implied: attributes that a file does not state, because llama.cpp runs every model of the family so.
        splits: how llama.cpp calls the rule by which text is cut before it is made tokens.
        constants: keys that are the same in every file.
    """

    model_type: str
    keys: dict[str, str]
    implied: dict[str, Any]
    splits: str
    constants: dict[str, int]


ARCHITECTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True},
        "qwen2",
        {},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
        "qwen2",
        {},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        "gpt-4o",
        {},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        {},
        "minimax-m2",
        {"expert_gating_func": 2},  # sigmoid
    ),
}
"""The architectures with experts that Transformers' GGUF loader knows, by their names in files."""

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts")
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight|.*\.input_scale")
_RAW = {"Q4_K": "q4_k", "NVFP4": "nvfp4"}


class LazyTensor:
    """A tensor that is made when Transformers' loader asks for it, as it asks for a slice of a safetensors file."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        """Takes what `make` will give: its shape and dtype."""
        self.shape, self.dtype, self._make = shape, dtype, make

    def __getitem__(self, _: Any) -> Tensor:
        """The whole tensor, whatever is asked for."""
        return self._make()

    def get_dtype(self) -> str:
        """The dtype as safetensors calls it."""
        return _SAFETENSORS_DTYPES[self.dtype]

    def get_shape(self) -> list[int]:
        """The shape as safetensors gives it."""
        return list(self.shape)


_SAFETENSORS_DTYPES = {torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def names(model: nn.Module, header: GGUFHeader) -> dict[str, str]:
    """The parameters of a model by the names of the tensors in a file that hold them, experts left out.

    Raises:
        CheckpointError: a tensor that is no parameter of the model, or a parameter that has no tensor.
    """
    return _names(model, header, _processor(model, header))


def state_dict(header: GGUFHeader, model: nn.Module) -> dict[str, LazyTensor]:
    """The tensors of a file by the names of a model's parameters, none of them read yet.

    Args:
        header: of the file.
        model: its experts modules may be dense or packed, its parameters on meta.

    Returns:
        Tensors beside the experts by their parameters' names and in their dtypes; those of experts as said above.

    Raises:
        CheckpointError: as for `names`, and an expert tensor of a type that cannot be loaded.
    """
    found = _beside_newer(header) if is_newer(header) else _beside(header, model)
    modules = expert_modules(model)
    for name, tensor in header.tensors.items():
        if match := _EXPERTS.fullmatch(name):
            layer, kind = int(match[1]), match[3]
            if layer not in modules:
                raise CheckpointError(f"{name}: the model has no experts in layer {layer}")
            has_scale = kind == "weight" and f"{name.removesuffix('weight')}scale" in header.tensors
            for proj, part in _matrices(match[2], tensor, kind):
                for suffix, lazy in _expert_tensors(name, part, kind, has_scale).items():
                    found[f"{modules[layer]}.{proj}_proj{suffix}"] = lazy
    return found


def _beside(header: GGUFHeader, model: nn.Module) -> dict[str, LazyTensor]:
    """The tensors beside the experts, by the names of a model's parameters."""
    processor, held = _processor(model, header), model.state_dict()
    found = {}
    for name, target in _names(model, header, processor).items():
        make = _reader(header.tensors[name], name, processor, held[target].dtype)
        found[target] = LazyTensor(tuple(held[target].shape), held[target].dtype, make)
    return found


def is_newer(header: GGUFHeader) -> bool:
    """Whether Transformers reads the architecture by conversions of its loader: it has them for Qwen3.5."""
    return _newer is not None and _newer.is_gguf_arch_supported(header.architecture)


def _beside_newer(header: GGUFHeader) -> dict[str, LazyTensor]:
    """The tensors beside the experts in float32, by their own names, which `newer_conversions` know."""

    def reader(name: str, tensor: GGUFTensor) -> Callable[[], Tensor]:
        return lambda: torch.from_numpy(layout.dequantize(name, tensor)).view(tensor.shape)

    return {
        name: LazyTensor(tensor.shape, torch.float32, reader(name, tensor))
        for name, tensor in header.tensors.items()
        if not _EXPERTS.fullmatch(name)
    }


def newer_conversions(header: GGUFHeader, config: Any, dtype: torch.dtype) -> list[WeightTransform]:
    """Transformers' own conversions of the tensors beside the experts; none for architectures that have none."""
    if not is_newer(header):
        return []
    beside = {name: 0 for name in header.tensors if not _EXPERTS.fullmatch(name)}
    mapping = _newer.get_gguf_conversion_mapping(header.architecture, config)
    made: list[WeightTransform] = _newer.add_gguf_load_ops(mapping, {}, SimpleNamespace(ggml_types=beside), dtype)
    return made


def config_dict(header: GGUFHeader) -> dict[str, Any]:
    """The config that a file's metadata and tensors make, for the class that its `model_type` names.

    Raises:
        CheckpointError: an architecture that is not known, or metadata that lacks something.
    """
    row, prefix = _row(header), f"{header.architecture}."
    stated = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {attr: stated[key] for key, attr in {**_COMMON, **row.keys}.items() if key in stated}
    config = {"model_type": row.model_type, **config, **row.implied, "hidden_act": "silu"}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or "num_hidden_layers" not in config:
        raise CheckpointError(f"{header.path} lacks token_embd.weight or {prefix}block_count")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["rope_parameters"] = _rope(row, stated, config.get("head_dim"))
    for attr, key in _TOKEN_IDS.items():
        config[attr] = header.metadata.get(f"tokenizer.ggml.{key}")
    if row.model_type == "gpt_oss":
        config["layer_types"] = _layer_types(int(config["num_hidden_layers"]))
    return config


def fix_config(config: Any, header: GGUFHeader) -> None:
    """Sets what Transformers' GGUF loader forgets or gets wrong in a config; see `config_dict`."""
    for attr, value in config_dict(header).items():
        if attr != "model_type":
            setattr(config, attr, value)


def metadata(config: Any, name: str = "") -> tuple[str, dict[str, Any]]:
    """What a file says of a model with this config, its tokenizer left out.

    Args:
        config: a config, or what is in a `config.json`.
        name: of the model.

    Returns:
        The architecture, and values by their keys.

    Raises:
        ValueError: a model that llama.cpp would not run as Transformers does, or one of another architecture.
    """
    config, architecture, row = _find(config)
    implied = {**row.implied, "hidden_act": "silu", "use_sliding_window": False}
    if row.model_type == "gpt_oss":
        implied["layer_types"] = _layer_types(config.num_hidden_layers)
    for attr, value in implied.items():
        if (own := getattr(config, attr, value)) != value:
            raise ValueError(f"a GGUF file of {architecture} means {attr}={value!r}; this model has {own!r}")
    stated: dict[str, Any] = {key: getattr(config, attr, None) for key, attr in {**_COMMON, **row.keys}.items()}
    stated |= {"vocab_size": config.vocab_size, **row.constants, **_rope_keys(row, config)}
    general = {"general.type": "model", "general.name": name or row.model_type, "general.file_type": layout.FILE_TYPE}
    keys = {f"{architecture}.{key}": value for key, value in stated.items() if value is not None}
    return architecture, {**general, "general.quantization_version": 2, **keys}


def tokenizer_metadata(folder: str | Path, config: Any) -> dict[str, Any]:
    """What a file says of the tokenizer in a folder; nothing if that is no byte-level BPE in a `tokenizer.json`."""
    gguf = layout.package()
    path = Path(folder) / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kinds = {step.get("type"): step for step in _steps(described.get("pre_tokenizer"))}
    if described.get("model", {}).get("type") != "BPE" or "ByteLevel" not in kinds:
        return {}
    config, _, row = _find(config)
    types = gguf.TokenType
    known = {id: (token, types.NORMAL) for token, id in described["model"]["vocab"].items()}
    for added in described.get("added_tokens", ()):
        known[added["id"]] = (added["content"], types.CONTROL if added["special"] else types.USER_DEFINED)
    tokens = [known.get(id, (f"[PAD{id}]", types.UNUSED)) for id in range(max(config.vocab_size, 1 + max(known)))]
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": row.splits if "Split" in kinds else "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in tokens],
        "tokenizer.ggml.merges": special.merges,
    }
    for kind, id in special.special_token_ids.items():
        found[f"tokenizer.ggml.{ {'pad': 'padding', 'unk': 'unknown'}.get(kind, kind) }_token_id"] = id
    for kind, is_added in special.add_special_token.items():
        found[f"tokenizer.ggml.add_{kind}_token"] = is_added
    if isinstance(special.chat_template, str):
        found["tokenizer.chat_template"] = special.chat_template
    return found


def tensor_names(config: Any, parameters: Iterable[str]) -> dict[str, str]:
    """The names of tensors in a file by those of parameters, experts left out.

    Args:
        config: of the model.
        parameters: names as the model has them or as its files do. An output layer tied to the embedding is left out.

    Raises:
        ValueError: a parameter that llama.cpp has no name for.
    """
    gguf = layout.package()
    config, architecture, _ = _find(config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name in parameters:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := re.fullmatch(r".*layers\.(\d+)\..*e_score_correction_bias", name):
            found[name] = f"blk.{match[1]}.exp_probs_b.bias"
            continue
        stem, dot, suffix = (name, ".", "weight") if name.endswith("sinks") else name.rpartition(".")
        if (base := known.get_name(stem)) is None:
            raise ValueError(f"llama.cpp has no name for {name} in a model of {architecture}")
        found[name] = base + dot + suffix
    return found


def dense_entry(name: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Entry:
    """An entry for a tensor beside the experts, in the type and shape that llama.cpp wants.

    Args:
        name: in the file.
        shape: of the parameter.
        dtype: of the parameter. Matrices keep it; vectors, routers and biases become float32.
        read: gives it.
    """
    if name.endswith("ffn_gate_inp_shexp.weight"):
        shape = shape[-1:]  # [1, H] in Transformers
    vector = len(shape) < 2 or not name.endswith(".weight") or "ffn_gate_inp." in name
    kinds = {torch_dtype: kind for kind, torch_dtype in layout.TORCH_TYPES.items()}
    return Entry(name, "F32" if vector else kinds.get(dtype, "F32"), shape, lambda: read().reshape(shape))


def expert_entries(config: Any, name: str, shape: tuple[int, ...], read: Callable[[], Any]) -> list[Entry]:
    """The entries for a projection of experts, or a bias of one: two for gates and ups, one for others.

    Args:
        config: of the model.
        name: of the parameter, such as `model.layers.0.mlp.experts.gate_up_proj` or the same with `_bias`.
        shape: [E, N, K] of the weights, or [E, N] of the bias.
        read: gives it, rows in the order of the model's class; called once for each entry.

    Raises:
        ValueError: a name that is none of experts.
    """
    module, _, proj = name.rpartition(".")
    proj, is_bias = proj.removesuffix("_bias"), proj.endswith("_bias")
    match = _MODULE.fullmatch(module)
    if match is None or not proj.endswith("_proj"):
        raise ValueError(f"{name} is no projection of experts")
    stem, ending = f"blk.{match[1]}.ffn_", "_exps.bias" if is_bias else "_exps.weight"
    dtype = "F32" if is_bias else layout.TYPE
    if proj != "gate_up_proj":
        return [Entry(stem + proj.removesuffix("_proj") + ending, dtype, shape, read)]
    rows, interleaved = shape[1] // 2, _find(config)[2].model_type == "gpt_oss"
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, rows), slice(rows, None))
    half = (shape[0], rows, *shape[2:])
    return [
        Entry(f"{stem}{part}{ending}", dtype, half, _rows(read, wanted))
        for part, wanted in zip(("gate", "up"), parts, strict=True)
    ]


def _rows(read: Callable[[], MXFP4Tensor | Tensor], wanted: slice) -> Callable[[], MXFP4Tensor | Tensor]:
    def part() -> MXFP4Tensor | Tensor:
        whole = read()
        if isinstance(whole, MXFP4Tensor):
            return MXFP4Tensor(whole.blocks[:, wanted], whole.scales[:, wanted])
        return whole[:, wanted]

    return part


def _row(header: GGUFHeader) -> Architecture:
    if header.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} is a GGUF file of {header.architecture}; known are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[header.architecture]


def _find(config: Any) -> tuple[Any, str, Architecture]:
    """A config as an object, the architecture of its model and the row of that; ValueError for another."""
    if isinstance(config, Mapping):
        config = AutoConfig.for_model(**config)
    for architecture, row in ARCHITECTURES.items():
        if row.model_type == config.model_type:
            return config, architecture, row
    known = ", ".join(row.model_type for row in ARCHITECTURES.values())
    raise ValueError(f"GGUF files can be written for {known}; this model is a {config.model_type}")


def _layer_types(count: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]


def _rope(row: Architecture, stated: Mapping[str, Any], head_dim: Any) -> dict[str, Any]:
    """`rope_parameters` of a config from the keys of a file."""
    kind = stated.get("rope.scaling.type", "none")
    rope = {"rope_type": {"none": "default"}.get(kind, kind), "rope_theta": stated.get("rope.freq_base", 10000.0)}
    if kind != "none":
        rope |= {own: stated[key] for own, key in _YARN.items() if key in stated}
    if kind == "yarn" and row.model_type == "gpt_oss":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "truncate": False}
    rotated = stated.get("rope.dimension_count")
    if row.model_type == "minimax_m2" and rotated is not None and head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return rope


def _rope_keys(row: Architecture, config: Any) -> dict[str, Any]:
    """The keys of a file from `rope_parameters`; ValueError for what llama.cpp has no keys for."""
    rope = {key: value for key, value in config.rope_parameters.items() if value is not None}
    kind, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta")
    found: dict[str, Any] = {"rope.freq_base": float(theta)}
    factor = rope.pop("partial_rotary_factor", 1.0)
    if row.model_type == "minimax_m2":
        found["rope.dimension_count"] = round(factor * config.head_dim)
    elif factor != 1.0:
        raise ValueError(f"a GGUF file of a {row.model_type} has no partial_rotary_factor")
    wanted = {"default": (), "linear": ("factor",), "yarn": (*_YARN, "truncate")}.get(kind)
    # gpt-oss is the family whose correction range is not rounded, and a file cannot say so of another.
    truncates = rope.get("truncate", True) == (row.model_type != "gpt_oss")
    if wanted is None or not set(rope) <= set(wanted) or (kind == "yarn" and not truncates):
        raise ValueError(f"rope_parameters {config.rope_parameters} cannot be said in a GGUF file of {row.model_type}")
    if kind != "default":
        found |= {"rope.scaling.type": kind, **{key: rope[own] for own, key in _YARN.items() if own in rope}}
        found["rope.scaling.factor"] = float(rope["factor"])
    return found


def _steps(described: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer."""
    if not described:
        return []
    return (
        [step for inner in described["pretokenizers"] for step in _steps(inner)]
        if (described["type"] == "Sequence")
        else [described]
    )


def _processor(model: Any, header: GGUFHeader) -> Any:
    _row(header)
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())


def _names(model: Any, header: GGUFHeader, processor: Any) -> dict[str, str]:
    experts = tuple(f"{name}." for name in expert_modules(model).values())
    held = {name: value for name, value in model.state_dict().items() if not name.startswith(experts)}
    # The loader knows whole models, and looks through all their submodules, which takes long and finds no more.
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    flat = SimpleNamespace(
        config=model.config,
        state_dict=lambda: {prefix + name: value for name, value in held.items()},
        named_children=lambda: (),
    )
    known = {theirs: own.removeprefix(prefix) for theirs, own in get_gguf_hf_weights_map(flat, processor).items()}
    found, unknown = {}, []
    for name in header.tensors:
        # llama.cpp adds `.weight` to parameters that are no modules.
        own = known.get(name, known.get(name.removesuffix(".weight")))
        if own is not None:
            found[name] = own
        elif not (_EXPERTS.fullmatch(name) or _NOT_WEIGHTS.fullmatch(name) or (prefix and name == "output.weight")):
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{header.path} holds {unknown[0]}, which {type(model).__name__} has no room for")
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    if missing := sorted(held.keys() - set(found.values()) - tied):
        raise CheckpointError(f"{header.path} lacks what {type(model).__name__} holds as {', '.join(missing[:4])}")
    return found


def expert_modules(model: nn.Module) -> dict[int, str]:
    """The names of experts modules by layer."""
    matches = (re.search(r"(?:^|\.)(\d+)\.", name) for name, _ in find_experts(model))
    return {int(match[1]): match.string for match in matches if match}


def _reader(tensor: GGUFTensor, name: str, processor: Any, dtype: torch.dtype) -> Callable[[], Tensor]:
    """What reads a tensor beside the experts."""

    def read() -> Tensor:
        weights = processor.process(weights=layout.dequantize(name, tensor), name=name).weights
        return torch.from_numpy(weights).to(dtype, copy=True)

    return read


def _matrices(proj: str, tensor: GGUFTensor, kind: str) -> list[tuple[str, GGUFTensor]]:
    """A tensor of experts as one for each matrix: of merged ones the first half is gates, the second ups."""
    if proj != "gate_up":
        return [(proj, tensor)]
    if kind == "scale":  # one for both
        return [("gate", tensor), ("up", tensor)]
    count, rows = tensor.shape[0], tensor.shape[1] // 2
    if 2 * rows != tensor.shape[1]:
        raise CheckpointError(f"gate_up {list(tensor.shape)} has no two halves")
    half = tensor.data.shape[1] // 2  # rows; bytes of a bias
    shape = (count, rows, *tensor.shape[2:])
    parts = (tensor.data[:, :half], tensor.data[:, half:])
    return [(part, tensor._replace(shape=shape, data=data)) for part, data in zip(("gate", "up"), parts, strict=True)]


def _expert_tensors(name: str, tensor: GGUFTensor, kind: str, has_scale: bool) -> dict[str, LazyTensor]:
    """The tensors that an expert tensor of a file is loaded as, by what they add to the projection's name."""
    shape, raw = tensor.shape, tensor.bytes()
    *lead, width = shape
    if tensor.dtype in layout.TORCH_TYPES:
        dtype = layout.TORCH_TYPES[tensor.dtype]
        ending = {"weight": "", "bias": "_bias", "scale": "_nvfp4_scale"}[kind]
        return {ending: LazyTensor(shape, dtype, lambda: raw.clone().view(dtype))}
    if tensor.dtype == layout.TYPE:
        return {
            "_blocks": LazyTensor((*lead, width // 2), torch.uint8, lambda: layout.decode_blocks(raw)),
            "_scales": LazyTensor((*lead, width // 32), torch.uint8, lambda: layout.decode_scales(raw)),
        }
    if tensor.dtype in _RAW:
        found = {f"_{_RAW[tensor.dtype]}": LazyTensor(tuple(raw.shape), torch.uint8, raw.clone)}
        if tensor.dtype == "NVFP4" and not has_scale:
            found["_nvfp4_scale"] = LazyTensor(shape[:1], torch.float32, lambda: torch.ones(shape[0]))
        return found
    known = ", ".join((layout.TYPE, *_RAW, *layout.TORCH_TYPES))
    raise CheckpointError(f"{name} is of type {tensor.dtype}; experts are loaded from {known}")

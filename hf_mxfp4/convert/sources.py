"""What a conversion reads: a folder of safetensors files, taken apart into experts and everything else.

What becomes of each tensor beside the experts:

    FP8 layers               as they are if source and target are both FP8 checkpoints with MXFP4 experts, whose config
                             describes them; else decoded to bfloat16
    packed layers            decoded to bfloat16: what is written describes experts alone
    scales of activations    left out, but for those of FP8 layers that stay
    all others               as they are
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..formats import CheckpointError, Dialect, Found, TensorInfo, fp8, is_activation_scale, is_expert, split, stacked
from ..formats.checkpoint import Checkpoint
from ..mxfp4 import MXFP4Tensor, ScaleRule, Ties
from ..quantizer.config import MXFP4Config
from .experts import Group, Rules, dense_groups, packed_groups
from .layout import Piece, Unit

logger = logging.get_logger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_REPLACED = ("config.json", "hf_quant_config.json")  # the latter is ModelOpt's second copy of what config.json says
_EMBEDDINGS = ("embed", "wte", "wpe")


class Options(NamedTuple):
    """Of a conversion, see `convert`."""

    to: str
    from_dense: bool = False
    requantize: bool = False
    rule: ScaleRule = "mse"
    ties: Ties = "even"


class Source(NamedTuple):
    """What is converted.

    Attributes:
        path: of it.
        files: that hold its weights.
        config: what its config.json says, less what it says of weights.
        stored: what it says of weights.
        model_type: of the language model.
        groups: its experts.
        others: tensors beside them as they will be, by the names of those that they are made of.
        order: the names of all tensors, as they lie in the files.
        dense: the names of linear layers beside the experts that are dense.
        decoded: how many layers beside the experts are decoded.
        copy_rest: copies into a folder what is neither weights nor config.
    """

    path: Path
    files: list[Path]
    config: dict[str, Any]
    stored: dict[str, Any]
    model_type: str
    groups: list[Group]
    others: dict[str, Unit]
    order: list[str]
    dense: list[str]
    decoded: int
    copy_rest: Callable[[Path], None]


def open_checkpoint(checkpoint: Checkpoint, dialect: Dialect | None, options: Options, rules: Rules) -> Source:
    """A folder of safetensors files. Everything about it that can be refused is refused here.

    Args:
        checkpoint: the folder.
        dialect: of the target; None for one that describes no layers beside the experts.
        options: of the conversion.
        rules: by which experts are quantized.

    Raises:
        CheckpointError: a source that is not whole, or holds no experts that can be converted.
        ValueError: an option that does not fit it.
    """
    if not checkpoint.config:
        raise CheckpointError(f"{checkpoint.path} has no config.json, which a conversion needs")
    found = checkpoint.detect()
    groups = _groups(checkpoint, found, options, rules)
    used = {name for group in groups for name in group.sources}
    others, dense, decoded = _others(checkpoint, found, used, dialect)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return Source(
        checkpoint.path,
        checkpoint.files,
        _without_weights(checkpoint.config),
        dict(checkpoint.quantization),
        checkpoint.model_type,
        groups,
        others,
        list(checkpoint.tensors),
        dense,
        decoded,
        lambda target: _copy_rest(folder, target),
    )


def target_config(source: Source, dialect: Dialect, options: Options) -> dict[str, Any]:
    """What config.json of a target in a dialect holds."""
    own = MXFP4Config(options.rule, options.ties)
    own = own.loading(source.stored) if source.stored else own
    own.write_as(dialect, source.dense, as_stored=source.decoded == 0)
    written = own.to_dict()
    if written.get("quant_method") == source.stored.get("quant_method") == "fp8":  # of FP8 layers, which stay
        keys = ("fmt", "activation_scheme", "weight_block_size", "scale_fmt")
        written |= {key: source.stored[key] for key in keys if key in source.stored}
    config = {**source.config, "quantization_config": written}
    if "mode" in written:  # MLX reads it under this name
        config["quantization"] = dialect.config(source.dense)
    if written.get("expert_dtype") is not None and source.model_type == "deepseek_v4":
        config["expert_dtype"] = written["expert_dtype"]
    return config


def _without_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))
    text = copied.get("text_config")
    for level in (copied, text) if isinstance(text, dict) else (copied,):
        for key in ("quantization_config", "quantization", "expert_dtype"):
            level.pop(key, None)
    return copied


def _groups(checkpoint: Checkpoint, found: Found, options: Options, rules: Rules) -> list[Group]:
    """The experts of the source; ValueError if the options do not fit them."""
    path = checkpoint.path
    if found.dialect is None:
        groups = dense_groups(checkpoint, rules)
        if not groups:
            raise CheckpointError(
                f"{path} holds no experts under names that this knows; from_pretrained with MXFP4Config, and then"
                " save_pretrained, may know more"
            )
        if not options.from_dense:
            raise ValueError(f"the experts of {path} are dense; pass from_dense (--from-dense) to quantize them")
        return groups
    if options.from_dense:
        raise ValueError(f"the experts of {path} are packed already, as {found.dialect.name}; leave out from_dense")
    if found.dialect is stacked.GPT_OSS_ORIGINAL:
        raise ValueError(
            f"{path} has OpenAI's own names for all tensors; load it with MXFP4Config and use save_pretrained"
        )
    if found.dialect.is_lossy and not options.requantize:
        raise ValueError(
            f"the experts of {path} are {found.dialect.name}; pass requantize (--requantize) to make them MXFP4, which"
            " loses precision"
        )
    return packed_groups(checkpoint, found.dialect, found.experts, rules)


def _others(
    checkpoint: Checkpoint, found: Found, used: set[str], dialect: Dialect | None
) -> tuple[dict[str, Unit], list[str], int]:
    """What becomes of tensors beside the experts.

    Returns:
        A unit by the name of the source's tensor; the names of linear layers that are dense; how many were decoded.
    """
    method = None if dialect is None else dialect.config([]).get("quant_method")
    stays = checkpoint.quantization.get("quant_method") == method == "fp8"
    layers: dict[str, tuple[str, ...]] = {name: row.siblings(name) for name, row in found.layers.items()}
    if not stays:
        layers |= {name: (name, scales) for name, scales in found.fp8.items()}
    if dialect is not split.MLX:
        layers |= {name: (name, *others) for name, others in found.affine.items()}
    used = used | {sibling for siblings in layers.values() for sibling in siblings}
    made: dict[str, Unit] = {}
    dense, dropped = [], []
    for name, info in checkpoint.tensors.items():
        if name in layers:
            unit = _decoded(checkpoint, found, name, layers[name])
        elif name in used:
            continue
        elif is_activation_scale(name) and (is_expert(name) or not stays):
            dropped.append(name)
            continue
        else:
            unit = _copied(checkpoint, name, info)
        made[name] = unit
        weight, written = next(iter(unit.tensors.items()))
        if weight.endswith(".weight") and len(written.shape) == 2 and written.dtype in ("BF16", "F16", "F32"):
            dense.append(weight.removesuffix(".weight"))
    if dropped:
        logger.warning(f"hf_mxfp4: {len(dropped)} scales of activations are left out, such as {dropped[0]}")
    dense = [layer for layer in dense if not any(part in layer.rpartition(".")[2] for part in _EMBEDDINGS)]
    if not any(layer.endswith("lm_head") for layer in dense):
        dense.append("lm_head")  # tied to the embedding, and a layer all the same
    return made, dense, len(layers)


def _copied(checkpoint: Checkpoint, name: str, info: TensorInfo) -> Unit:
    def make() -> Iterator[Piece]:
        yield Piece(name, 0, checkpoint.read(name))

    return Unit({name: info}, make)


def _decoded(checkpoint: Checkpoint, found: Found, name: str, siblings: tuple[str, ...]) -> Unit:
    """A layer beside the experts as bfloat16."""
    row = found.layers.get(name)
    weight = name if row is None else name.removesuffix(row.blocks) + ".weight"
    rows, columns = checkpoint.tensors[name].shape
    if row is not None:
        columns = (16 if row.is_lossy else 32) * checkpoint.tensors[siblings[1]].shape[-1]
    if name in found.affine:
        columns = 32 * columns // _affine_bits(checkpoint.quantization, name.removesuffix(".weight"))

    def make() -> Iterator[Piece]:
        tensors = [checkpoint.read(sibling) for sibling in siblings]
        try:
            if name in found.affine:
                yield Piece(
                    weight, 0, split.decode_affine(tensors[0], tensors[1], tensors[2], columns).to(torch.bfloat16)
                )
                return
            if row is None:
                side = checkpoint.quantization.get("weight_block_size")
                block = tuple(side) if isinstance(side, list) and len(side) == 2 else None
                yield Piece(weight, 0, fp8.decode(tensors[0], tensors[1], block).to(torch.bfloat16))
                return
            decoded = row.decode(*tensors)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error
        is_packed = isinstance(decoded, MXFP4Tensor)
        yield Piece(weight, 0, decoded.dequantize(torch.bfloat16) if is_packed else decoded.to(torch.bfloat16))

    return Unit({weight: TensorInfo("BF16", (rows, columns))}, make)


def _affine_bits(config: Mapping[str, Any], layer: str) -> int:
    """The bits of a layer in MLX's affine format, which its own entry in the config says, or the one for all."""
    own = config.get(layer)
    bits = (own if isinstance(own, Mapping) else config).get("bits")
    if bits not in (2, 4, 8):
        raise CheckpointError(f"the config says {bits!r} bits for {layer}; layers of 2, 4 and 8 bits are decoded")
    return int(bits)


def _copy_rest(source: Path, target: Path) -> None:
    """Copies files that hold no weights, and folders of such."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _REPLACED:
            shutil.copy(path, target / path.name)
        elif path.is_dir() and not path.name.startswith(".") and not _holds_weights(path):
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)


def _holds_weights(folder: Path) -> bool:
    return any(path.name.endswith(_WEIGHTS) for path in folder.rglob("*"))

"""GGUF files as what is converted, what is written, and what is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..formats import CheckpointError, TensorInfo
from ..formats import gguf as layout
from ..formats.gguf import Entry, GGUFHeader, GGUFTensor
from ..mxfp4 import MXFP4Tensor
from ..quantizer import gguf as models
from .experts import Group, Matrix, Names, names_of, split_rows
from .layout import Piece, Unit
from .sources import Options, Source

NAME = "gguf"
"""What the format is called among dialects."""

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "gate": ("gate_proj",), "up": ("up_proj",), "down": ("down_proj",)}
_TOKENIZER = "tokenizer.ggml.model"
_DTYPE = "BF16"  # of what is not MXFP4, once it has left a file


def is_file(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return Path(path).is_file() and Path(path).suffix == ".gguf"


def groups(header: GGUFHeader, modules: dict[int, str], names: Names, bias_dtype: str = "F32") -> list[Group]:
    """The experts of a file.

    Args:
        header: of the file.
        modules: what the modules of a model that hold them are called, by layer; others are called as in the file.
        names: of one expert's matrices.
        bias_dtype: what biases are read as.

    Raises:
        CheckpointError: experts that are not MXFP4, or a tensor of gates without one of ups.
    """
    found = layout.detect(header).dialect
    if found is None or found.is_lossy:
        held = "no packed experts" if found is None else f"experts in {found.name}"
        raise CheckpointError(f"{header.path} holds {held}; expected MXFP4")
    stacks: dict[tuple[int, str], dict[str, tuple[str, GGUFTensor]]] = {}
    for name, tensor in header.tensors.items():
        if match := _EXPERTS.fullmatch(name):
            stacks.setdefault((int(match[1]), match[3]), {})[match[2]] = name, tensor
    made = []
    for (layer, kind), tensors in sorted(stacks.items(), key=lambda item: (item[0][1] == "bias", item[0][0])):
        module = modules.get(layer, f"blk.{layer}.experts")
        pair = ["gate", "up"] if {"gate", "up"} <= tensors.keys() else []
        for parts in [pair, *([part] for part in tensors if part not in pair)]:
            if parts:
                dtype = bias_dtype if kind == "bias" else ""
                made.append(_group(module, [tensors[part] for part in parts], parts, dtype, names))
    return made


def open_file(path: Path, options: Options) -> Source:
    """A file as what is converted, its tensors under the names that Transformers' files have.

    Raises:
        CheckpointError: a file that is not whole, or is of a model or in types that are not read.
        ValueError: an option that does not fit it.
    """
    if options.from_dense:
        raise ValueError(f"{path} is a GGUF file, whose experts are packed already; leave out from_dense")
    if options.to == NAME:
        raise ValueError(f"{path} is a GGUF file already")
    header = layout.read_header(path)
    stated = models.config_dict(header)
    config = AutoConfig.for_model(stated.pop("model_type"), **stated)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=layout.TORCH_TYPES[_DTYPE])
    in_file = _file_names(config.model_type)
    modules = {layer: in_file(name) for layer, name in models.expert_modules(model).items()}
    experts = groups(header, modules, names_of(config.model_type), _DTYPE)
    others, dense = {}, []
    lazy, theirs = models.state_dict(header, model), models.names(model, header)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, own in theirs.items():
        others[name] = _unit(in_file(own), lazy[own])
        if own.removesuffix(".weight") in linears:
            dense.append(in_file(own).removesuffix(".weight"))
    described = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    described.pop("_experts_implementation", None)
    return Source(
        path,
        sorted(path.parent.glob(path.name.replace("-00001-of-", "-*-of-"))),  # all files of a model in several
        described,
        {},
        config.model_type,
        experts,
        others,
        list(header.tensors),
        dense,
        0,
        lambda folder: _copy_tokenizer(header, folder),
    )


def write(source: Source, path: Path, progress: bool) -> int:
    """Writes what is converted as a file, and gives the bytes of its tensors.

    Raises:
        ValueError: a model that llama.cpp does not run, or a path that does not end in `.gguf`.
    """
    if path.suffix != ".gguf":
        raise ValueError(f"{path} does not end in .gguf, which names of GGUF files do")
    config = {**source.config, "model_type": source.model_type}
    architecture, metadata = models.metadata(config)
    folder = source.path if source.path.is_dir() else source.path.parent
    metadata |= models.tokenizer_metadata(folder, config)
    entries = _dense_entries(source, config)
    for group in source.groups:
        entries += _expert_entries(group, config)
    entries.sort(key=_place)
    with tqdm(total=len(entries), disable=not progress, desc="Converting") as bar:
        layout.write(path, architecture, metadata, [_counted(entry, bar) for entry in entries])
    return sum(entry.nbytes for entry in entries)


def _group(module: str, held: list[tuple[str, GGUFTensor]], parts: list[str], dtype: str, names: Names) -> Group:
    """A group of one tensor, or of one of gates and one of ups."""
    matrices = tuple(matrix for part in parts for matrix in _PARTS[part])
    spelled = tuple(names.spelled.get(matrix, matrix) for matrix in matrices)
    count, (name, first) = len(matrices) // len(held), held[0]
    for other, tensor in held:
        if tensor.shape != first.shape:
            raise CheckpointError(f"{other} holds {list(tensor.shape)}, {name} {list(first.shape)}; expected the same")
    experts, rows, *rest = first.shape

    def get(tensor: GGUFTensor, e: int) -> Matrix:
        raw = torch.from_numpy(tensor.data[e])
        if not dtype:
            return layout.decode(raw)
        return raw.clone().view(layout.TORCH_TYPES[tensor.dtype]).to(layout.TORCH_TYPES[dtype])

    def read(e: int) -> tuple[Matrix, ...]:
        return tuple(matrix for _, tensor in held for matrix in split_rows(get(tensor, e), count, False))

    sources = [name for name, _ in held]
    return Group(module, matrices, spelled, experts, (rows // count, *rest), dtype, sources, read)


def _unit(name: str, lazy: models.LazyTensor) -> Unit:
    def make() -> Iterator[Piece]:
        yield Piece(name, 0, lazy[...])

    return Unit({name: TensorInfo(lazy.get_dtype(), lazy.shape)}, make)


def _file_names(model_type: str) -> Callable[[str], str]:
    """What turns a parameter's name into that in a model's files."""
    found = [c for c in get_checkpoint_conversion_mapping(model_type) or () if isinstance(c, WeightRenaming)]
    renamings = [renaming.reverse_transform() for renaming in reversed(found)]

    def rename(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return rename


def _copy_tokenizer(header: GGUFHeader, folder: Path) -> None:
    if _TOKENIZER in header.metadata:
        tokenizer = AutoTokenizer.from_pretrained(header.path.parent, gguf_file=header.path.name)
        tokenizer.save_pretrained(folder)


def _dense_entries(source: Source, config: Any) -> list[Entry]:
    held = {name: unit for unit in source.others.values() for name in unit.tensors}
    entries = []
    for own, theirs in models.tensor_names(config, held).items():
        info = held[own].tensors[own]
        dtype = layout.TORCH_TYPES.get(info.dtype, torch.float32)
        entries.append(models.dense_entry(theirs, info.shape, dtype, _reader(held[own])))
    return entries


def _reader(unit: Unit) -> Callable[[], Tensor]:
    return lambda: next(unit.make()).tensor


def _expert_entries(group: Group, config: Any) -> list[Entry]:
    """A tensor for each matrix, made expert by expert."""
    entries, ending = [], "_bias" if group.is_bias else ""
    for i, matrix in enumerate(group.matrices):
        shape = (group.experts, *group.shape)
        entries += models.expert_entries(config, f"{group.module}.{matrix}{ending}", shape, partial(_experts, group, i))
    return entries


def _experts(group: Group, i: int) -> Iterator[MXFP4Tensor | Tensor]:
    for e in range(group.experts):
        yield group.read(e)[i]


def _place(entry: Entry) -> tuple[int, str]:
    """The same for the same tensors, whatever they were made of: layer by layer, after what is in none."""
    match = re.match(r"blk\.(\d+)\.", entry.name)
    return int(match[1]) if match else -1, entry.name


def _counted(entry: Entry, bar: Any) -> Entry:
    def read() -> Any:
        bar.update()
        return entry.read()

    return entry._replace(read=read)

"""The experts of a checkpoint in any layout as canonical matrices, by what their names say.

The pivot that conversion and comparison turn on. E experts, N rows and K columns of one matrix:

    Group      gate_proj and up_proj of a module, or its up_proj alone, or its down_proj; weights or biases
    read(e)    the matrices of one expert: MXFP4Tensors [N, K], or biases [N]

Files hold them a tensor an expert, a stack a matrix, or gate and up rows of an expert in one stack, where they take
turns in models of `families.INTERLEAVED_MODELS` and all gates come first in others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .. import ops
from ..families import INTERLEAVED_MODELS
from ..formats import CheckpointError, Dialect, Name, is_expert, stacked
from ..formats.checkpoint import Checkpoint
from ..mxfp4 import BLOCK_SIZE, MXFP4Tensor, ScaleRule, Ties, check_width

Matrix = MXFP4Tensor | Tensor
"""An MXFP4Tensor [N, K] or a bias [N]."""

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_USUAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "gate": "gate_proj", "up": "up_proj"}
_USUAL |= {"down": "down_proj", "gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
_ONE = re.compile(r"(?P<owner>(?:.*\.)?)experts\.(?P<expert>\d+)\.(?P<proj>[\w.]+?)\.(?P<kind>weight|bias)")
_STACK = re.compile(r"(?P<owner>(?:.*\.)?)experts\.(?P<proj>gate_up_proj|up_proj|down_proj)(?P<kind>_bias)?")
_FLOATS = ("BF16", "F16", "F32")


class Rules(NamedTuple):
    """How weights that are not MXFP4 are made so, and what that cost.

    Attributes:
        scale_rule: see `mxfp4.quantize`.
        ties: see `mxfp4.quantize`.
        losses: the squares of the error that it added to matrices of few bits, and of their weights, summed, by name.
    """

    scale_rule: ScaleRule = "mse"
    ties: Ties = "even"
    losses: dict[str, tuple[float, float]] | None = None


class Group(NamedTuple):
    """Matrices of a module that some layout keeps together.

    Attributes:
        module: such as `model.layers.0.mlp.experts`.
        matrices: gate_proj and up_proj, or one of up_proj and down_proj, or what a model of its own calls one.
        spelled: the same as files of one tensor an expert call them.
        experts: how many.
        shape: of one matrix, (N, K), or of a bias, (N,).
        dtype: of a bias, by safetensors' name; empty for weights.
        sources: the names of all tensors that it is read from.
        read: the matrices of an expert.
    """

    module: str
    matrices: tuple[str, ...]
    spelled: tuple[str, ...]
    experts: int
    shape: tuple[int, ...]
    dtype: str
    sources: list[str]
    read: Callable[[int], tuple[Matrix, ...]]

    @property
    def is_bias(self) -> bool:
        """Whether it holds biases."""
        return self.dtype != ""


class _Part(NamedTuple):
    """The tensors of a matrix of one expert or of all: what they are read by, and the shape that they are read as."""

    base: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class Names(NamedTuple):
    """What a model calls the matrices of one expert: `roles` ours by theirs, `spelled` theirs by ours."""

    roles: dict[str, str]
    spelled: dict[str, str]


_Parts = dict[str, dict[str, dict[int | None, _Part]]]
"""By module, matrix, and expert."""


def takes_turns(model_type: str, dialect: Dialect | None = None) -> bool:
    """Whether gate and up rows do in stacks of a model, or, if its type is not known, of a dialect."""
    if not model_type:
        return dialect in (stacked.GPT_OSS, stacked.GPT_OSS_ORIGINAL)
    return model_type in INTERLEAVED_MODELS


def packed_groups(checkpoint: Checkpoint, dialect: Dialect, codes: Iterable[str], rules: Rules) -> list[Group]:
    """The experts that a checkpoint holds in a dialect, in the order of its tensors, biases after weights.

    Args:
        checkpoint: what holds them.
        dialect: of them.
        codes: the names of their codes.
        rules: for dialects that are not MXFP4.

    Raises:
        CheckpointError: experts that are missing, or matrices whose shapes differ.
    """
    weights: _Parts = {}
    for name in codes:
        parsed, siblings = dialect.parse(name), dialect.siblings(name)
        if parsed is None:
            raise CheckpointError(f"{name} is not what {dialect.name} calls a tensor of experts")
        *lead, count = checkpoint.tensors[siblings[1]].shape
        size = 16 if dialect.is_lossy else BLOCK_SIZE
        _add(weights, parsed, _Part(name, siblings, (*lead, size * count), ""))
    biases: _Parts = {}
    for name, info in checkpoint.tensors.items():
        parsed = dialect.parse(name) if name.endswith(dialect.bias) and is_expert(name) else None
        if parsed is not None and parsed.part < 0 and parsed.module in weights:
            _add(biases, parsed, _Part(name, (name,), info.shape, info.dtype))

    def get(part: _Part, expert: int | None) -> MXFP4Tensor:
        return _decode(checkpoint, dialect, part, expert, rules)

    return _all_groups(checkpoint, (weights, biases), get, takes_turns(checkpoint.model_type, dialect))


def dense_groups(checkpoint: Checkpoint, rules: Rules) -> list[Group]:
    """The dense experts of a checkpoint, which are quantized as they are read; as `packed_groups`.

    Raises:
        CheckpointError: experts that are missing, or matrices whose shapes differ or fit no layout.
        ValueError: a width that is no multiple of 32.
    """
    weights: _Parts = {}
    biases: _Parts = {}
    for name, info in checkpoint.tensors.items():
        match = _ONE.fullmatch(name) or _STACK.fullmatch(name)
        if match is None or info.dtype not in _FLOATS:
            continue
        expert = match.groupdict().get("expert")
        parsed = Name(f"{match['owner']}experts", None if expert is None else int(expert), match["proj"], 0)
        dims = len(info.shape) - (expert is None)
        if match["kind"] in ("bias", "_bias") and dims == 1:
            _add(biases, parsed, _Part(name, (name,), info.shape, info.dtype))
        elif dims == 2:
            _add(weights, parsed, _Part(name, (name,), info.shape, ""))
    biases = {module: parts for module, parts in biases.items() if module in weights}
    transposed = {module for module, parts in weights.items() if _is_transposed(module, parts, checkpoint)}
    for module in transposed:
        for parts in weights[module].values():
            parts.update({e: p._replace(shape=(p.shape[0], p.shape[2], p.shape[1])) for e, p in parts.items()})
    for part in (part for parts in weights.values() for stack in parts.values() for part in stack.values()):
        check_width(part.shape, part.base)

    def get(part: _Part, expert: int | None) -> MXFP4Tensor:
        weight = _read(checkpoint, part.base, expert)
        is_turned = expert is not None and part.base.rpartition(".")[0] in transposed
        return ops.quantize(weight.mT if is_turned else weight, rules.scale_rule, rules.ties, name=part.base)

    return _all_groups(checkpoint, (weights, biases), get, takes_turns(checkpoint.model_type))


def join_rows(matrices: list[Matrix], turns: bool) -> Matrix:
    """Matrices of one expert as one: their rows take turns, or follow one another."""
    if len(matrices) == 1:
        return matrices[0]
    packed = [matrix for matrix in matrices if isinstance(matrix, MXFP4Tensor)]
    if packed:
        return MXFP4Tensor(*(_join(tensors, turns) for tensors in zip(*packed, strict=True)))
    return _join([matrix for matrix in matrices if isinstance(matrix, Tensor)], turns)


def split_rows(matrix: Matrix, count: int, turns: bool) -> tuple[Matrix, ...]:
    """The reverse of `join_rows`, by view."""
    if isinstance(matrix, MXFP4Tensor):
        halves = (_split(tensor, count, turns) for tensor in matrix)
        return tuple(MXFP4Tensor(*pair) for pair in zip(*halves, strict=True))
    return _split(matrix, count, turns)


def _join(tensors: Sequence[Tensor], turns: bool) -> Tensor:
    return torch.stack(list(tensors), dim=1).flatten(0, 1) if turns else torch.cat(list(tensors))


def _split(tensor: Tensor, count: int, turns: bool) -> tuple[Tensor, ...]:
    return tuple(tensor[i::count] for i in range(count)) if turns else tensor.chunk(count)


def _add(parts: _Parts, name: Name, part: _Part) -> None:
    parts.setdefault(name.module, {}).setdefault(name.proj, {})[name.expert] = part


def _read(checkpoint: Checkpoint, name: str, expert: int | None) -> Tensor:
    return checkpoint.read(name) if expert is None else checkpoint.read_slice(name, expert)


def _decode(checkpoint: Checkpoint, dialect: Dialect, part: _Part, expert: int | None, rules: Rules) -> MXFP4Tensor:
    tensors = [_read(checkpoint, name, expert) for name in part.names]
    try:
        decoded = dialect.decode(*tensors)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{part.base}: {error}") from error
    if isinstance(decoded, MXFP4Tensor):
        return decoded
    rounded = ops.quantize(decoded, rules.scale_rule, rules.ties, name=part.base)
    if rules.losses is not None:
        added = float((rounded.dequantize() - decoded).double().square().sum())
        rules.losses[part.base] = added, float(decoded.double().square().sum())
    return rounded


def _all_groups(
    checkpoint: Checkpoint,
    found: tuple[_Parts, _Parts],
    get: Callable[[_Part, int | None], MXFP4Tensor],
    turns: bool,
) -> list[Group]:
    """Groups of weights and then of biases, which are read as they are."""
    names = names_of(checkpoint.model_type)

    def get_bias(part: _Part, expert: int | None) -> Tensor:
        return _read(checkpoint, part.base, expert)

    weights, biases = found
    groups = []
    for module, parts in weights.items():
        groups += _groups(module, parts, get, names, turns)
    for module, parts in biases.items():
        groups += _groups(module, parts, get_bias, names, turns)
    return groups


def _groups(
    module: str,
    parts: Mapping[str, Mapping[int | None, _Part]],
    get: Callable[[_Part, int | None], Matrix],
    names: Names,
    turns: bool,
) -> list[Group]:
    """The groups of one module."""
    if all(list(by_expert) == [None] for by_expert in parts.values()):
        return _groups_of_stacks(module, {proj: stack[None] for proj, stack in parts.items()}, get, names, turns)
    if any(None in by_expert for by_expert in parts.values()):
        raise CheckpointError(f"{module} holds some matrices for each expert and some for all of them")
    roles = {names.roles.get(proj, proj): proj for proj in parts}
    pairs = [("gate_proj", "up_proj")] if {"gate_proj", "up_proj"} <= roles.keys() else []
    joined = {role for pair in pairs for role in pair}
    groups = []
    for matrices in [*pairs, *((role,) for role in roles if role not in joined)]:
        spelled = tuple(roles[role] for role in matrices)
        held = [parts[proj] for proj in spelled]
        experts = _count(module, spelled, held)
        part = _same([by_expert[e] for by_expert in held for e in range(experts)])

        def read(e: int, held: list[Mapping[int | None, _Part]] = held) -> tuple[Matrix, ...]:
            return tuple(get(by_expert[e], None) for by_expert in held)

        sources = [name for by_expert in held for p in by_expert.values() for name in p.names]
        groups.append(Group(module, matrices, spelled, experts, part.shape, part.dtype, sources, read))
    return groups


def _groups_of_stacks(
    module: str,
    stacks: Mapping[str, _Part],
    get: Callable[[_Part, int | None], Matrix],
    names: Names,
    turns: bool,
) -> list[Group]:
    """The groups of a module that holds a tensor for all experts: of gates and ups, or a matrix each."""
    if {"gate_proj", "up_proj"} <= stacks.keys():
        wanted = [("gate_proj", "up_proj"), *((proj,) for proj in stacks if proj not in ("gate_proj", "up_proj"))]
    else:
        wanted = [(proj,) for proj in stacks]
    groups = []
    for projs in wanted:
        held = [stacks[proj] for proj in projs]
        part = _same(held)
        matrices = tuple(matrix for proj in projs for matrix in _PARTS.get(proj, (proj,)))
        count = len(matrices) // len(held)
        if part.shape[1] % count:
            raise CheckpointError(f"{part.base} has {part.shape[1]} rows, an odd number, for gates and ups")

        def read(e: int, held: list[_Part] = held, count: int = count) -> tuple[Matrix, ...]:
            return tuple(matrix for part in held for matrix in split_rows(get(part, e), count, turns))

        spelled = tuple(names.spelled.get(matrix, matrix) for matrix in matrices)
        shape = (part.shape[1] // count, *part.shape[2:])
        sources = [name for p in held for name in p.names]
        groups.append(Group(module, matrices, spelled, part.shape[0], shape, part.dtype, sources, read))
    return groups


def _count(module: str, spelled: tuple[str, ...], held: list[Mapping[int | None, _Part]]) -> int:
    """How many experts there are, each with all its matrices."""
    numbers = {e for by_expert in held for e in by_expert if e is not None}
    for proj, by_expert in zip(spelled, held, strict=True):
        lost = next((e for e in range(max(numbers) + 1) if e not in by_expert), None)
        if lost is not None:
            raise CheckpointError(f"{module}.{lost}.{proj} is missing from the checkpoint")
    return max(numbers) + 1


def _same(parts: list[_Part]) -> _Part:
    """The first of parts that all have one shape."""
    first = parts[0]
    for part in parts:
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{part.base} holds {list(part.shape)}, {first.base} {list(first.shape)}; expected the same"
            )
    return first


def _is_transposed(module: str, parts: Mapping[str, Mapping[int | None, _Part]], checkpoint: Checkpoint) -> bool:
    """Whether a module's stacks of dense weights are [E, K, N].

    Both projections together tell: one is from H to 2 I or I features, the other from I to H.
    """
    stacks = {proj: tuple(by_expert[None].shape[1:]) for proj, by_expert in parts.items() if None in by_expert}
    if not stacks:
        return False
    first = next((proj for proj in ("gate_up_proj", "up_proj") if proj in stacks), None)
    if first is None or "down_proj" not in stacks:
        raise CheckpointError(f"{module} has {', '.join(stacks)} and no other projection")
    count, hidden = len(_PARTS[first]), _hidden_size(checkpoint)
    (a, b), (c, d) = stacks[first], stacks["down_proj"]
    upright = (b, a) == (c, count * d)
    turned = (a, b) == (d, count * c)
    if upright and turned and hidden is not None and a != b:
        upright, turned = b == hidden, a == hidden
    if upright == turned:
        raise CheckpointError(f"{module}.{first} {[a, b]} does not tell rows from columns beside down_proj {[c, d]}")
    return turned


def _hidden_size(checkpoint: Checkpoint) -> int | None:
    text = checkpoint.config.get("text_config")
    levels = [level for level in (text, checkpoint.config) if isinstance(level, Mapping)]
    return next((level["hidden_size"] for level in levels if isinstance(level.get("hidden_size"), int)), None)


def names_of(model_type: str) -> Names:
    """By Transformers' own conversion of the model, else the usual names."""
    roles, spelled = dict(_USUAL), {}
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        if not isinstance(conversion, WeightConverter):
            continue
        target = conversion._original_target_patterns[0].rpartition(".")[2]
        sources = [source for source in conversion._original_source_patterns if ".experts.*." in source]
        if target not in _PARTS or len(sources) != len(_PARTS[target]):
            continue
        for source, role in zip(sources, _PARTS[target], strict=True):
            theirs = source.rpartition(".experts.*.")[2].removesuffix(".weight")
            roles[theirs], spelled[role] = role, theirs
    return Names(roles, spelled)

"""Which conversions a load needs, and which a save of what was loaded.

A model's own conversions say how its files name and stack experts. From each follows one for packed experts: other
sources, other targets, the same ops. Where a model has none, its experts go by the usual names.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.utils import logging

from ..experts import MXFP4Experts
from ..families import FLAT_SOURCES, INTERLEAVED, layout_of
from ..formats import Dialect, Found, gguf, named, per_expert, stacked
from ..linear import MXFP4Linear
from . import original_gpt_oss
from .conversion import BiasConverter, ExpertsConverter
from .linears import LayerConverter, LinearConverter
from .rows import JoinRows
from .saving import StackExperts, saving_conversions, saving_layers, saving_parts, saving_stacks
from .task import FlatRows, KeepStack, Task, scoped_like

logger = logging.get_logger(__name__)

_PARTS = {"gate_up_proj": ["gate_proj", "up_proj"], "up_proj": ["up_proj"], "down_proj": ["down_proj"]}
"""The matrices of one expert that a projection is made of."""


class Wanted(NamedTuple):
    """What decides about the layout of a save.

    Attributes:
        save_format: of the config.
        model_type: of the model.
        left_dense: whether some of its experts are not packed.
    """

    save_format: str
    model_type: str
    left_dense: bool


def for_loading(
    task: Task,
    found: Found,
    conversions: list[WeightTransform],
    block: tuple[int, int] | None = None,
    is_gguf: bool = False,
) -> list[WeightTransform]:
    """Converters for the targets of a load. The model's own stay in use after them, for experts that stay dense.

    Args:
        task: shared by all of them.
        found: how the checkpoint holds experts and other layers.
        conversions: the model's own.
        block: rows and columns that share a scale in FP8 layers; None if the checkpoint's config does not say.
        is_gguf: the checkpoint is a GGUF file, which has dense experts in stacks of gates and of ups.
    """
    packed, linears = _packed(task), _linears(task)
    dense = {full for _, full in task.targets.values()} - packed - linears
    ours: list[WeightTransform] = [LinearConverter(task)] if linears else []
    dialect = task.dialect
    # Sources end differently for packed and dense targets: the loader tells converters apart by their patterns.
    for names, suffix, anchor in ((packed, "_blocks", "$"), (dense, "", "(?:$)")):
        if dialect is None or dialect.layout == "per expert":
            ours += _one_by_one(task, names, conversions, suffix, anchor)
        if is_gguf or (dialect is not None and dialect.layout == "split"):
            ours += _split(task, names, suffix, anchor)
        if dialect is None or dialect.layout == "stacked":
            ours += _stacked(task, names, suffix, anchor)
    if dialect is None:
        ours += _flat(task)
    elif dialect is stacked.GPT_OSS_ORIGINAL:
        ours += original_gpt_oss.conversions()
    if found.layers or found.fp8 or found.affine or found.experts:
        ours.append(LayerConverter(task, found, conversions, block))
    if is_gguf or dialect is not None:
        ours += _biases(task, packed | dense, dialect or gguf.MXFP4)
    return ours


def for_saving(task: Task, conversions: list[WeightTransform], wanted: Wanted) -> tuple[Dialect, list[WeightTransform]]:
    """The layout that a save is in, and the conversions that make it, written as if for loading.

    Raises:
        ValueError: a `save_format` that does not fit the model.
    """
    names, has_linears = _packed(task), bool(_linears(task))
    originals = _conversions_of(names, conversions)
    patterns = [pattern for original in originals for pattern in original._original_source_patterns]
    has_names = bool(patterns or has_linears) and all(p.endswith(".weight") and "*" in p for p in patterns)
    dialect = _dialect(wanted, has_names, has_linears)
    nameless = [proj for proj in sorted(map(_proj, names)) if not _has_name(dialect, proj)]
    if nameless:
        raise ValueError(f"save_format={dialect.name!r} has no name for {nameless[0]}; use 'hf_mxfp4'")
    saved: list[WeightTransform] = []
    if dialect.layout == "stacked":
        for leaf in _leaves(names):
            saved += saving_stacks(leaf, dialect)
    elif dialect.layout == "per expert" and has_names:
        saved += [twin for original in originals for twin in saving_conversions(original, dialect)]
        saved += saving_layers(dialect) if has_linears else []
    else:
        for leaf in _leaves(names):
            saved += saving_parts(leaf, _PARTS[leaf.rpartition(".")[2]], dialect, _takes_turns(task))
        _check_names(saved, conversions, dialect)
    if dialect is stacked.VLLM or (dialect.layout == "per expert" and not has_names):
        logger.warning(
            f"hf_mxfp4: Transformers without hf_mxfp4 does not find the experts of a {wanted.model_type} that is saved"
            f" as {dialect.name}, and makes up random ones"
        )
    if dialect.layout != "stacked" or dialect is stacked.VLLM:
        saved += _biases(task, names, dialect, saving=True)
    return dialect, saved


def _check_names(saved: list[WeightTransform], conversions: list[WeightTransform], dialect: Dialect) -> None:
    """Raises ValueError if the model's own renamings would change the names that a dialect has for matrices."""
    renamings = [copy.deepcopy(c).reverse_transform() for c in conversions if isinstance(c, WeightRenaming)]
    for pattern in (pattern for conversion in saved for pattern in conversion._original_source_patterns):
        wanted = pattern.replace("*", "0")
        name = f"model.layers.0.mlp.{wanted}"
        for renaming in reversed(renamings):
            name, _ = renaming.rename_source_key(name)
        if not name.endswith(wanted):
            raise ValueError(
                f"save_format={dialect.name!r} has {wanted}, which this model's own names make {name}; use 'hf_mxfp4'"
            )


def _dialect(wanted: Wanted, has_names: bool, has_linears: bool) -> Dialect:
    """What was asked for, or what other readers of such a model expect.

    Args:
        wanted: see there.
        has_names: the model's files have a name for each expert's matrices.
        has_linears: its experts are single layers.
    """
    if wanted.save_format == "auto":
        if wanted.model_type == "gpt_oss":
            return stacked.GPT_OSS
        # Stock Transformers cannot read a file of a tensor an expert in which some experts are dense.
        one_by_one = has_names and (has_linears or not wanted.left_dense)
        return per_expert.COMPRESSED_TENSORS if one_by_one else stacked.HF_MXFP4
    dialect = named(wanted.save_format)
    assert dialect is not None
    if dialect == stacked.GPT_OSS and wanted.model_type != "gpt_oss":
        raise ValueError(f"save_format='gpt-oss' is for gpt-oss models, not {wanted.model_type}; use 'hf_mxfp4'")
    if dialect.layout != "per expert" and has_linears:
        raise ValueError(
            f"save_format={dialect.name!r} stacks experts, and this model's are single layers; use"
            f" {per_expert.COMPRESSED_TENSORS.name!r}"
        )
    return dialect


def _per_expert(task: Task, original: WeightConverter, suffix: str, anchor: str) -> WeightConverter:
    """The model's own conversion, from dense or low-bit tensors, to packed or dense projections."""
    sources = list(original._original_source_patterns)
    if task.dialect is not None:
        bases = [pattern.removesuffix(".weight") for pattern in sources]
        sources = [base + re.escape(ending) for ending in task.dialect.endings for base in bases]
    # Packed rows are output rows in every layout, so that what transposes dense weights has nothing to do.
    operations = [op for op in original.operations if task.dialect is None or not isinstance(op, Transpose)]
    targets = list(original._original_target_patterns)
    anchored = [source + anchor for source in sources]
    return scoped_like(original, ExpertsConverter(anchored, targets[0] + suffix, operations, targets, task))


def _one_by_one(
    task: Task, names: set[str], conversions: list[WeightTransform], suffix: str, anchor: str
) -> list[WeightTransform]:
    """Conversions of a tensor an expert, by the model's own names or the usual ones."""
    own = _conversions_of(names, conversions)
    if task.dialect is None:
        return [_per_expert(task, c, suffix, anchor) for c in own]
    # The file has one tensor an expert, whatever the model's own files have.
    own = [c for c in own if any("*" in pattern for pattern in c._original_source_patterns)]
    made: list[WeightTransform] = [_per_expert(task, c, suffix, anchor) for c in own]
    return made + _usual_names(task, names - _filled_by(own, names), suffix, anchor)


def _usual_names(task: Task, names: set[str], suffix: str, anchor: str) -> list[WeightTransform]:
    """Conversions of a tensor an expert, for models whose own files have none."""
    assert task.dialect is not None
    made: list[WeightTransform] = []
    for leaf in _leaves(names):
        owner, _, proj = leaf.rpartition(".")
        bases = [f"{owner}.*.{part}" for part in _PARTS[proj]]
        sources = [base + re.escape(ending) + anchor for ending in task.dialect.endings for base in bases]
        operations = [MergeModulelist(dim=0), *_joins(task, proj)]
        made.append(ExpertsConverter(sources, leaf + suffix, operations, [leaf], task))
    return made


def _split(task: Task, names: set[str], suffix: str, anchor: str) -> list[WeightTransform]:
    """Conversions of stacks of gates and of ups, low-bit or dense ones of a GGUF file."""
    made: list[WeightTransform] = []
    for leaf in _leaves(names):
        proj = leaf.rpartition(".")[2]
        bases = [_in_file(task.dialect or gguf.MXFP4, leaf, part) for part in _PARTS[proj]]
        endings = task.dialect.endings if task.dialect else ("",)
        sources = [base + re.escape(ending) + anchor for ending in endings for base in bases]
        operations = [KeepStack(), *_joins(task, proj)]
        made.append(ExpertsConverter(sources, leaf + suffix, operations, [leaf], task))
    return made


def _joins(task: Task, proj: str) -> list[JoinRows | Concatenate]:
    if len(_PARTS[proj]) == 1:
        return []
    return [JoinRows(takes_turns=True)] if _takes_turns(task) else [Concatenate(dim=1)]


def _stacked(task: Task, names: set[str], suffix: str, anchor: str) -> list[WeightTransform]:
    """Conversions of tensors that hold all experts already, dense or packed."""
    made: list[WeightTransform] = []
    for leaf in _leaves(names):
        if task.dialect is None:
            sources, target = [leaf], leaf
        else:
            base = _in_file(task.dialect, leaf, leaf.rpartition(".")[2])
            sources = [base + re.escape(ending) for ending in task.dialect.endings]
            target = f"mlp.{leaf}" if task.dialect is stacked.GPT_OSS_ORIGINAL else leaf
        anchored = [source + anchor for source in sources]
        made.append(ExpertsConverter(anchored, target + suffix, [KeepStack()], [leaf], task))
    return made


def _in_file(dialect: Dialect, leaf: str, proj: str) -> str:
    """The pattern of a projection's name in a file, without its ending.

    Args:
        dialect: of the file.
        leaf: the last two parts of the projection's name in the model.
        proj: what is looked for, the projection itself or a part of it.
    """
    owner = leaf.rpartition(".")[0]
    containers = [owner if container == "experts" else container for container in dialect.container]
    spelled = next(theirs for theirs, ours in dialect.projections.items() if ours == proj)
    return rf"(?:{'|'.join(containers)})\.{spelled}"


def _in_saved_file(dialect: Dialect, leaf: str, proj: str) -> str:
    """As `_in_file`, but the name that is written."""
    owner = leaf.rpartition(".")[0]
    spelled = next(theirs for theirs, ours in dialect.projections.items() if ours == proj)
    return f"{owner if dialect.container[0] == 'experts' else dialect.container[0]}.{spelled}"


def _flat(task: Task) -> list[WeightTransform]:
    """Conversions of the 2-D tensors of flat classes."""
    flat = {full for module, full in task.targets.values() if (layout := layout_of(module)) and layout.is_flat}
    found: list[WeightTransform] = []
    for leaf in _leaves(flat):
        owner, _, proj = leaf.rpartition(".")
        sources = [rf"{owner}.mlp.{source}$" for source in FLAT_SOURCES[proj]]
        found.append(ExpertsConverter(sources, f"{leaf}_blocks", [FlatRows()], [leaf], task))
    return found


def _biases(task: Task, names: set[str], dialect: Dialect, *, saving: bool = False) -> list[WeightTransform]:
    """Conversions of the biases of projections, which a dialect may have by expert, by matrix or by other names.

    Args:
        task: of the load.
        names: the projections.
        dialect: of the file that is read, or written.
        saving: the names of a file that is written are no patterns.
    """
    targets = task.targets.values()
    biased = {full for module, full in targets if full in names and hasattr(module, f"{_proj(full)}_bias")}
    made: list[WeightTransform] = []
    for leaf in _leaves(biased):
        owner, _, proj = leaf.rpartition(".")
        ending, target = dialect.bias if saving else f"{re.escape(dialect.bias)}$", f"{leaf}_bias"
        in_file = _in_saved_file if saving else _in_file
        joins = JoinRows(_takes_turns(task))
        if dialect.layout == "per expert":
            sources = [f"{owner}.*.{part}{ending}" for part in _PARTS[proj]]
            if saving:
                made.append(WeightConverter(sources, [target], [StackExperts(0), joins]))
            else:
                made.append(BiasConverter(sources, target, [MergeModulelist(0), joins], [target], task))
        elif dialect.layout == "split":
            sources = [f"{in_file(dialect, leaf, part)}{ending}" for part in _PARTS[proj]]
            made.append(WeightConverter(sources, [target], [joins]))
        elif dialect.projections.get(proj) != proj:
            target = f"mlp.{target}" if dialect is stacked.GPT_OSS_ORIGINAL else target
            made.append(WeightConverter([f"{in_file(dialect, leaf, proj)}{ending}"], [target], [joins]))
    return made


def _takes_turns(task: Task) -> bool:
    """Whether gate and up rows take turns in the experts of the load."""
    classes = {_dense_class(module).__name__ for module, _ in task.targets.values()}
    return not classes.isdisjoint(INTERLEAVED)


def _dense_class(module: nn.Module) -> type:
    own: type = getattr(module, "dense_class", type(module))
    return own


def _packed(task: Task) -> set[str]:
    return {full for module, full in task.targets.values() if isinstance(module, MXFP4Experts)}


def _linears(task: Task) -> set[str]:
    return {full for module, full in task.targets.values() if isinstance(module, MXFP4Linear)}


def _has_name(dialect: Dialect, proj: str) -> bool:
    """Whether a dialect can name a projection, or the matrices that it is made of."""
    parts = [proj] if dialect.layout == "stacked" else _PARTS[proj]
    return set(parts) <= set(dialect.projections.values())


def _proj(full: str) -> str:
    return full.rpartition(".")[2]


def _leaves(names: Iterable[str]) -> list[str]:
    """The last two parts of each name, such as `experts.down_proj`."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})


def _conversions_of(names: set[str], conversions: list[WeightTransform]) -> list[WeightConverter]:
    """The conversions that fill the projections `names` of the model."""
    return [
        conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        and any(name.endswith(conversion.target_patterns[0]) for name in names)
    ]


def _filled_by(conversions: list[WeightConverter], names: set[str]) -> set[str]:
    """The projections that the model's own conversions of one-expert tensors fill."""
    targets = [
        target
        for conversion in conversions
        if any("*" in pattern for pattern in conversion._original_source_patterns)
        for target in conversion.target_patterns
    ]
    return {name for name in names if any(name.endswith(target) for target in targets)}

"""Which conversions a load needs, and which a save of what was loaded.

A model's own conversions say how its files name and stack experts. From each follows one for packed experts: other
sources, other targets, the same ops.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers.core_model_loading import Transpose, WeightConverter, WeightTransform

from ..experts import MXFP4Experts
from ..families import FLAT_SOURCES, layout_of
from ..formats import DIALECTS, Dialect, per_expert, stacked
from ..linear import MXFP4Linear
from .conversion import ExpertsConverter
from .linears import DecodeLinear, LinearConverter
from .saving import saving_conversions, saving_renamings, saving_stacks
from .task import FlatRows, KeepStack, Task, scoped_like


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


def for_loading(task: Task, conversions: list[WeightTransform]) -> list[WeightTransform]:
    """Converters for the targets of a load. The model's own stay in use after them, for experts that stay dense."""
    packed, linears = _packed(task), _linears(task)
    dense = {full for _, full in task.targets.values()} - packed - linears
    ours: list[WeightTransform] = [LinearConverter(task)] if linears else []
    # Sources end differently for packed and dense targets: the loader tells converters apart by their patterns.
    for names, suffix, anchor in ((packed, "_blocks", "$"), (dense, "", "(?:$)")):
        if task.dialect is None or task.dialect.layout == "per expert":
            ours += [_per_expert(task, c, suffix, anchor) for c in _conversions_of(names, conversions)]
        if task.dialect is None or task.dialect.layout == "stacked":
            ours += _stacked(task, names, suffix, anchor)
    if task.dialect is None:
        ours += _flat(task)
    elif task.dialect.layout == "per expert":
        sources = [f"{task.dialect.blocks}$", f"{task.dialect.scales}$"]
        ours.append(WeightConverter(sources, [".weight"], [DecodeLinear(task)]))
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
    if dialect != per_expert.COMPRESSED_TENSORS:
        return dialect, [*saving_stacks(_leaves(names), dialect)]
    saved: list[WeightTransform] = [twin for original in originals for twin in saving_conversions(original, dialect)]
    return dialect, saved + (saving_renamings(dialect) if has_linears else [])


def _dialect(wanted: Wanted, has_names: bool, has_linears: bool) -> Dialect:
    """What was asked for, or what other readers of such a model expect.

    Args:
        wanted: see there.
        has_names: the model's files have a name for each expert's matrices.
        has_linears: its experts are single layers.
    """
    rows = {row.name: row for row in DIALECTS}
    if wanted.save_format == "auto":
        if wanted.model_type == "gpt_oss":
            return stacked.GPT_OSS
        # Stock Transformers cannot read a file of a tensor an expert in which some experts are dense.
        one_by_one = has_names and (has_linears or not wanted.left_dense)
        return per_expert.COMPRESSED_TENSORS if one_by_one else stacked.HF_MXFP4
    dialect = rows[wanted.save_format]
    if dialect == stacked.GPT_OSS and wanted.model_type != "gpt_oss":
        raise ValueError(f"save_format='gpt-oss' is for gpt-oss models, not {wanted.model_type}; use 'hf_mxfp4'")
    if dialect == per_expert.COMPRESSED_TENSORS and not has_names:
        raise ValueError(
            f"save_format={dialect.name!r} stores a tensor an expert, and this model's files do not; use 'hf_mxfp4'"
        )
    if dialect != per_expert.COMPRESSED_TENSORS and has_linears:
        raise ValueError(
            f"save_format={dialect.name!r} stacks experts, and this model's are single layers; use"
            f" {per_expert.COMPRESSED_TENSORS.name!r}"
        )
    return dialect


def _per_expert(task: Task, original: WeightConverter, suffix: str, anchor: str) -> WeightConverter:
    """The model's own conversion, from dense or packed tensors, to packed or dense projections."""
    sources = list(original._original_source_patterns)
    if task.dialect is not None:
        bases = [pattern.removesuffix(".weight") for pattern in sources]
        sources = [base + ending for ending in (task.dialect.blocks, task.dialect.scales) for base in bases]
    # Packed rows are output rows in every layout, so that what transposes dense weights has nothing to do.
    operations = [op for op in original.operations if task.dialect is None or not isinstance(op, Transpose)]
    targets = list(original._original_target_patterns)
    anchored = [source + anchor for source in sources]
    return scoped_like(original, ExpertsConverter(anchored, targets[0] + suffix, operations, targets, task))


def _stacked(task: Task, names: set[str], suffix: str, anchor: str) -> list[WeightTransform]:
    """Conversions of tensors that hold all experts already, dense or packed."""
    stored = [""] if task.dialect is None else [task.dialect.blocks, task.dialect.scales]
    return [
        ExpertsConverter([f"{leaf}{ending}{anchor}" for ending in stored], leaf + suffix, [KeepStack()], [leaf], task)
        for leaf in _leaves(names)
    ]


def _flat(task: Task) -> list[WeightTransform]:
    """Conversions of the 2-D tensors of flat classes."""
    flat = {full for module, full in task.targets.values() if (layout := layout_of(module)) and layout.is_flat}
    found: list[WeightTransform] = []
    for leaf in _leaves(flat):
        owner, _, proj = leaf.rpartition(".")
        sources = [rf"{owner}.mlp.{source}$" for source in FLAT_SOURCES[proj]]
        found.append(ExpertsConverter(sources, f"{leaf}_blocks", [FlatRows()], [leaf], task))
    return found


def _packed(task: Task) -> set[str]:
    return {full for module, full in task.targets.values() if isinstance(module, MXFP4Experts)}


def _linears(task: Task) -> set[str]:
    return {full for module, full in task.targets.values() if isinstance(module, MXFP4Linear)}


def _leaves(names: set[str]) -> list[str]:
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

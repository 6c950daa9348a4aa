"""What packed experts ask of Transformers' plans for several processes, and what one process holds of a weight.

Before a model is loaded, Transformers makes each parameter that a plan names a `DTensor` on meta: split in a dimension
over processes. Its loader then reads of every tensor of the checkpoint the part that belongs to the process; of
tensors of one expert each, it gives None for those that are another's. E experts, N output features, K input features.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.core_model_loading import Transpose

from ..experts import MXFP4Experts
from ..families import layout_of
from ..formats import Dialect, stacked
from ..mxfp4 import BLOCK_SIZE
from ..packed import PackedModule, shard_of
from .task import FlatRows, KeepStack, Task

_TURNED = {
    "colwise": "rowwise",
    "rowwise": "colwise",
    "packed_colwise": "packed_rowwise",
    "packed_rowwise": "packed_colwise",
}
"""The style of a packed projection [E, N, K], by that of a dense one [E, K, N]."""

_SIZES = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")


class Share(NamedTuple):
    """What a process holds of a projection.

    Attributes:
        shape: of its part, [E, N, K].
        whole: of the projection.
        ways: into how many parts a dimension is split, by dimension, for those that are.
    """

    shape: tuple[int, int, int]
    whole: tuple[int, int, int]
    ways: dict[int, int]


def share_of(module: nn.Module, name: str) -> Share:
    """This process's share of a projection of an experts module, packed or dense, by its full name."""
    proj, layout = name.rpartition(".")[2], layout_of(module)
    assert layout is not None
    is_packed = isinstance(module, MXFP4Experts)
    parameter = module.get_parameter(f"{proj}_blocks" if is_packed else proj)
    shape, ways = shard_of(parameter)
    whole = tuple(parameter.shape)
    turned = layout.is_transposed and not is_packed
    if turned:
        ways = {(0, 2, 1)[dim]: count for dim, count in ways.items()}
    part, all_ = (_canonical(s, is_packed, turned) for s in (shape, whole))
    if not ways:  # a dense class may have room for more experts than have weights
        count = int(getattr(module, layout.experts))
        part, all_ = (count, *part[1:]), (count, *all_[1:])
    return Share(part, all_, ways)


def _canonical(shape: tuple[int, ...], is_packed: bool, turned: bool) -> tuple[int, int, int]:
    experts, rows, columns = shape
    if turned:
        rows, columns = columns, rows
    return experts, rows, 2 * columns if is_packed else columns


def update_plan(model: nn.Module, plan: dict[str, str]) -> None:
    """Gives packed projections the styles that a plan has for dense ones, in place of these.

    A plan of the caller's own names `{proj}_blocks` and `{proj}_scales`: Transformers refuses rules that match nothing.
    """
    left = {_in_any_layer(name) for name, _ in model.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, MXFP4Experts):
            continue
        for proj in module.projection_names:
            key = _in_any_layer(f"{name}.{proj}")
            if key in plan:
                style = _TURNED.get(plan[key], plan[key]) if module.layout.is_transposed else plan[key]
                plan.update({key + suffix: style for suffix in ("_blocks", "_scales")})
    for key in [key for key in plan if f"{key}_blocks" in plan and key not in left]:
        del plan[key]


def _in_any_layer(name: str) -> str:
    """A name as plans have it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def check_checkpoint(model: Any, dialect: Dialect | None, is_gguf: bool) -> None:
    """Raises ValueError for a checkpoint whose tensors cannot be split over the processes of the load, if any are."""
    config = getattr(model.config, "distributed_config", None)
    if config is None or all((getattr(config, size, None) or 1) == 1 for size in _SIZES):
        return
    if is_gguf or dialect is stacked.GPT_OSS_ORIGINAL or (dialect is not None and dialect.is_lossy):
        called = "a GGUF file" if is_gguf or dialect is None else f"a checkpoint in {dialect.name}"
        raise ValueError(
            f"{called} cannot be split over processes as it loads; load it in one process, save it, and load that"
        )


def check_experts(module: nn.Module, name: str, task: Task, operations: list[Any]) -> None:
    """Raises ValueError if the loader's parts of the checkpoint's tensors are not those of a packed projection.

    Args:
        module: what holds the projection.
        name: of the projection, in full.
        task: of the load.
        operations: that make it from the checkpoint's tensors.
    """
    share, layout = share_of(module, name), layout_of(module)
    assert layout is not None
    if not share.ways:
        return
    packed_first = "save the model packed in one process, and load that"
    advice = "use expert parallelism or FSDP, which split the experts and not their matrices"
    is_packed, what = isinstance(module, MXFP4Experts), type(module).__name__
    if isinstance(module, PackedModule):
        what = module.dense_class.__name__
    if isinstance(operations[0], FlatRows) or (layout.identities and not is_packed):
        raise ValueError(f"{name}: the experts of {what} cannot be split over processes as they load; {packed_first}")
    if getattr(module, layout.experts) == share.whole[0] and _runs_own_experts(module, name):
        raise ValueError(f"{name}: {what} does not run on a part of its experts; expert parallelism cannot be used")
    if not share.ways.keys() & {1, 2}:
        return
    if layout.has_bias:
        raise ValueError(f"{name}: tensor parallelism would add the biases of {what} more than once; {advice}")
    if isinstance(operations[0], KeepStack) and len(operations) > 1:
        raise ValueError(f"{name}: tensor parallelism cannot split gates and ups that the file stacks apart; {advice}")
    if (layout.is_transposed and not (is_packed and task.dialect)) or any(isinstance(o, Transpose) for o in operations):
        doing = "be decoded" if task.dialect else "be quantized on load"
        raise ValueError(
            f"{name}: the transposed experts of {what} cannot {doing} under tensor parallelism; {advice}, or"
            f" {packed_first}"
        )
    _check_width(name, share, layout.has_gate)


def _runs_own_experts(module: nn.Module, name: str) -> bool:
    """Whether each process runs experts of its own. What FSDP has split is whole again when it is used."""
    proj = name.rpartition(".")[2]
    parameter: Any = module.get_parameter(f"{proj}_blocks" if isinstance(module, MXFP4Experts) else proj)
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    return any(axis in ("ep", "tp") and getattr(placement, "dim", None) == 0 for axis, placement in axes)


def _check_width(name: str, share: Share, has_gate: bool) -> None:
    """Every process's part of the inner width is whole blocks; ValueError, with the numbers that fit, if not."""
    owner, _, proj = name.rpartition(".")
    dim = 2 if 2 in share.ways else 1
    width, ways = share.whole[dim], share.ways[dim]
    if dim == 1 and proj != "down_proj":  # its rows are what down_proj takes in
        name, width = f"{owner}.down_proj", width // 2 if has_gate else width
    check_blocks(name, width, ways)


def check_blocks(name: str, width: int, ways: int) -> None:
    """Raises ValueError unless a width can be split `ways` ways into whole blocks."""
    if width % (ways * BLOCK_SIZE) == 0:
        return
    blocks = width // BLOCK_SIZE
    fits = [str(n) for n in range(1, blocks + 1) if blocks % n == 0]
    raise ValueError(
        f"{name} has an input width of {width}, which {ways} processes cannot share in multiples of {BLOCK_SIZE};"
        f" tp_size {' or '.join(fits)} fits, and so does expert parallelism"
    )


def check_linear(parameter: Tensor, name: str) -> None:
    """Raises ValueError for a layer of an expert list under tensor parallelism, which its forward does not know."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and shard_of(parameter)[1]:
        raise ValueError(f"{name}: experts that are lists of layers cannot be split by tensor parallelism; use FSDP")


def check_decoded(parameter: Tensor, name: str, block: tuple[int, int] | None) -> None:
    """Raises ValueError if a layer beside the experts is split where its scales are not.

    Args:
        parameter: the dense weight [N, K].
        name: of it.
        block: rows and columns that share a scale; None if that is not known.
    """
    for dim, ways in shard_of(parameter)[1].items():
        size = parameter.shape[dim]
        if block is None or size % (ways * block[dim]):
            known = f"blocks of {block[0]} x {block[1]}" if block else "its tensors do not say which"
            raise ValueError(
                f"{name} {list(parameter.shape)} is stored with scales for parts of it ({known}) and cannot be split"
                f" {ways} ways in dimension {dim}; load it in one process with dequantize=True, save it, and load that"
            )

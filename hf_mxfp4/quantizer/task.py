"""What the converters of one load share, and small pieces that all of them are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from .. import mxfp4
from ..formats import CheckpointError, Dialect
from ..packed import PackedModule, Source

_Converter = TypeVar("_Converter", bound=WeightConverter)


class Task(NamedTuple):
    """What the converters of one load share.

    Attributes:
        dialect: how the checkpoint holds packed experts; None if it holds dense ones.
        rules: scale rule and ties, for dense experts.
        targets: what the converters may fill, by every name that the loader may use for it: the module and the full
            name of its projection. An `MXFP4Experts` is filled packed, a dense module is filled with decoded weights.
        filled: names of parameters that have been filled.
        reports: the loader's running report, once there is one.
    """

    dialect: Dialect | None
    rules: tuple[mxfp4.ScaleRule, mxfp4.Ties]
    targets: dict[str, tuple[nn.Module, str]]
    filled: set[str]
    reports: list[Any]

    def decode(self, name: str, codes: Tensor, scales: Tensor) -> mxfp4.MXFP4Tensor:
        """Canonical tensors from the checkpoint's; CheckpointError, naming the weight, if they do not fit."""
        assert self.dialect is not None
        try:
            return self.dialect.decode(codes, scales)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error

    def hand_over(
        self,
        module: PackedModule,
        name: str,
        tensor: mxfp4.MXFP4Tensor,
        dtypes: tuple[str, ...],
        layout: str,
    ) -> dict[str, Tensor]:
        """What the loader is to set for the weight `name`, and the module told of it.

        Args:
            module: what holds the weight.
            name: in full.
            tensor: the packed weight.
            dtypes: of the checkpoint's tensors that it was made from.
            layout: of these, in words.

        Returns:
            The parameters by full name.
        """
        if self.dialect is not None:
            module.source = Source(self.dialect.name, dtypes, "kept byte for byte")
        else:
            module.source = Source(f"dense, {layout}", dtypes, f"quantized: {self.rules[0]}, ties {self.rules[1]}")
        proj = name.rpartition(".")[2]
        filled = {}
        for suffix, part in zip(("_blocks", "_scales"), tensor, strict=True):
            # While dense weights load, the parameter stands on meta in their dtype (see MXFP4HfQuantizer); from here
            # on it is what it will be, which offloading to disk looks at.
            meta = torch.empty(part.shape, dtype=torch.uint8, device="meta")
            module.register_parameter(proj + suffix, nn.Parameter(meta, requires_grad=False))
            filled[name + suffix] = part
        self.filled.update(filled)
        return filled


class KeepStack(ConversionOps):  # type: ignore[misc]  # Transformers has no type marker
    """Stands for the conversion of a tensor that already holds all experts: none."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The input as it is."""
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        """The same."""
        return self


class FlatRows(KeepStack):
    """Stands for the conversion of the 2-D tensors of a flat class, which hold all experts one below the other."""


def without_tensors(converter: _Converter) -> _Converter:
    """A copy that has collected nothing. What does not change in a load is shared: there is a copy for each key."""
    copy = object.__new__(type(converter))
    for kind in type(converter).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if hasattr(converter, slot):
                object.__setattr__(copy, slot, getattr(converter, slot))
    copy.collected_tensors, copy.layer_targets = defaultdict(list), defaultdict(set)
    return copy


def scoped_like(original: WeightConverter, converter: _Converter) -> _Converter:
    """The converter, with the scope of the original: the part of the model whose keys it is for."""
    for scope in ("scope_prefix", "base_model_prefix"):
        if hasattr(original, scope):
            setattr(converter, scope, getattr(original, scope))
    return converter


def read(item: Future[Tensor] | Callable[[], Tensor] | Tensor) -> Tensor:
    """The tensor of what the loader collected: a promise of one, a function that reads one, or one."""
    if isinstance(item, Tensor):
        return item
    return item.result() if isinstance(item, Future) else item()


def dtype_names(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """What torch calls the tensors' dtypes."""
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def first(tensors: dict[str, Any]) -> Tensor:
    """The first tensor of a dictionary of tensors or lists of them."""
    value = next(iter(tensors.values()))
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


def check_shape(tensor: Tensor, expected: tuple[int, ...], name: str) -> None:
    """Raises CheckpointError unless the packed codes of the weight `name` have the shape that the model expects."""
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name}: packed bytes are {list(tensor.shape)}, the model's configuration makes them {list(expected)}"
        )

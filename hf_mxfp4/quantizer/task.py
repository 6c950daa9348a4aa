"""What the converters of one load share, and small pieces that all of them are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.accelerate import get_device
from typing_extensions import Self

from .. import mxfp4, ops
from ..formats import CheckpointError, Dialect, stacked
from ..packed import PackedModule, Source

_Converter = TypeVar("_Converter", bound=WeightConverter)


class Task(NamedTuple):
    """What the converters of one load share.

    Attributes:
        dialect: how the checkpoint holds low-bit experts; None if it holds dense ones.
        rules: scale rule and ties, for dense experts.
        targets: what the converters may fill, by every name that the loader may use for it: the module and the full
            name of its projection. An `MXFP4Experts` is filled packed, a dense module is filled with decoded weights.
        filled: names of parameters that have been filled.
        reports: the loader's running report, once there is one.
        losses: squares of the error that requantizing a module's weights added, and of these weights, summed.
        device_map: where modules go, once that is known.
    """

    dialect: Dialect | None
    rules: tuple[mxfp4.ScaleRule, mxfp4.Ties]
    targets: dict[str, tuple[nn.Module, str]]
    filled: set[str]
    reports: list[Any]
    losses: dict[nn.Module, tuple[float, float]]
    device_map: Mapping[str, Any]

    def stays(self, name: str) -> bool:
        """Whether a packed parameter is read where it is when it is needed: on disk, its bytes under the same name."""
        if not self.device_map or self.dialect not in (stacked.GPT_OSS, stacked.HF_MXFP4):
            return False
        return bool(get_device(self.device_map, name) == "disk")

    def decode(self, name: str, tensors: Sequence[Tensor]) -> mxfp4.MXFP4Tensor | Tensor:
        """What the checkpoint's tensors of one weight hold: canonical tensors, or float32 weights of a lossy dialect.

        Raises:
            CheckpointError: naming the weight, tensors that do not fit.
        """
        assert self.dialect is not None
        try:
            decoded: mxfp4.MXFP4Tensor | Tensor = self.dialect.decode(*tensors)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error
        return decoded

    def pack(self, name: str, module: PackedModule, tensors: Sequence[Tensor]) -> mxfp4.MXFP4Tensor:
        """As `decode`, with weights of a lossy dialect quantized anew, and the module's loss kept.

        Args:
            name: of the weight.
            module: that holds it.
            tensors: as the dialect has them for one weight.
        """
        decoded = self.decode(name, tensors)
        if isinstance(decoded, mxfp4.MXFP4Tensor):
            return decoded
        packed = ops.quantize(decoded, *self.rules, name=name)
        added, norm = self.losses.get(module, (0.0, 0.0))
        added += float((packed.dequantize() - decoded).double().square().sum())
        self.losses[module] = (added, norm + float(decoded.double().square().sum()))
        return packed

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
        if module in self.losses:
            assert self.dialect is not None
            error, norm = self.losses[module]
            loss = (error / norm) ** 0.5 if norm else 0.0
            rule = f"requantized: {self.rules[0]}, ties {self.rules[1]}; relative error {loss:.1e}"
            module.source = Source(self.dialect.name, dtypes, rule, loss)
        elif self.dialect is not None:
            module.source = Source(self.dialect.name, dtypes, "kept byte for byte")
        else:
            module.source = Source(f"dense, {layout}", dtypes, f"quantized: {self.rules[0]}, ties {self.rules[1]}")
        proj = name.rpartition(".")[2]
        filled = {}
        for suffix, part in zip(("_blocks", "_scales"), tensor, strict=True):
            # While dense weights load, the parameter stands on meta in their dtype (see MXFP4HfQuantizer); from here
            # on it is what it will be, which offloading to disk looks at. It stays split over processes if it is.
            meta = torch.empty(part.shape, dtype=torch.uint8, device="meta")
            held: Any = module.get_parameter(proj + suffix)
            if hasattr(held, "device_mesh"):
                whole = {"shape": held.shape, "stride": held.stride()}
                meta = held.from_local(meta, held.device_mesh, held.placements, run_check=False, **whole)
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


class TaskConverter(WeightConverter):  # type: ignore[misc]
    """Fills one weight of a load. The loader copies it for each weight, and then hands that what it collected."""

    __slots__ = ("task",)

    fills: ClassVar[type[nn.Module]] = nn.Module
    """What holds the weights that it is for."""

    def __init__(
        self, source_patterns: list[str], target_pattern: str, operations: list[ConversionOps], task: Task
    ) -> None:
        """Takes the patterns of the loader, and what all converters of the load share."""
        super().__init__(source_patterns, [target_pattern], operations)
        self.task = task

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that has collected nothing. What does not change in a load is shared: there is a copy for each key."""
        copy = object.__new__(type(self))
        for kind in type(self).__mro__:
            for slot in getattr(kind, "__slots__", ()):
                if hasattr(self, slot):
                    object.__setattr__(copy, slot, getattr(self, slot))
        copy.collected_tensors, copy.layer_targets = defaultdict(list), defaultdict(set)
        return copy

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """As stock, but only for keys of weights that it is for: others go on to the model's own converters."""
        renamed, pattern = super().rename_source_key(source_key)
        module, _ = self.task.targets.get(renamed, (None, ""))
        return (renamed, pattern) if pattern is not None and isinstance(module, self.fills) else (source_key, None)

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """Fills the weight. Called by the loader, with every key of it collected.

        Returns:
            `{weight}_blocks` and `{weight}_scales`, or the dense `{weight}`, by full name; but for what the loader
            would write to another file, though it is in the checkpoint already.

        Raises:
            CheckpointError: tensors that are missing, or of a shape that does not fit the model.
        """
        self.task.reports[:] = [loading_info]
        module, name = self.task.targets[layer_name]
        collected = {pattern: self.collected_tensors.pop(pattern) for pattern in list(self.collected_tensors)}
        extra = {"full_layer_name": name, "model": model, "config": config, "missing_keys": set()}
        filled = self.fill(module, name, collected, extra)
        left = {key for key in filled if isinstance(module, PackedModule) and self.task.stays(key)}
        if left:
            loading_info.missing_keys.difference_update(left)
        return {key: tensor for key, tensor in filled.items() if key not in left}

    def fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """What `convert` returns.

        Args:
            module: what holds the weight.
            name: of the weight, in full.
            collected: what the loader collected, by source pattern; see `read`.
            extra: further arguments of the model's own ops.
        """
        raise NotImplementedError


class FlatLoader(OffloadedWeightsLoader):  # type: ignore[misc]  # accelerate has no type marker
    """accelerate's reader, for gpt-oss files: packed codes as modules hold them, where the file has blocks apart."""

    def __init__(self, loader: OffloadedWeightsLoader, flat: set[str]) -> None:
        """Takes the place of a reader; `flat` are the names of what is 4-D in its files."""
        self.__dict__.update(loader.__dict__)
        self.flat = flat

    def __getitem__(self, key: str) -> Tensor:
        """As stock; codes uint8 [E, N, K / 2]."""
        tensor: Tensor = super().__getitem__(key)
        return tensor.flatten(2) if key in self.flat else tensor


def read_flat(model: nn.Module, task: Task) -> None:
    """Has accelerate read packed codes that stay in a gpt-oss file in the shape that modules hold them in."""
    flat = {name for name in task.filled if name.endswith("_blocks") and task.stays(name)}
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            weights_map = getattr(part, "weights_map", None)
            if isinstance(module, PackedModule) and isinstance(weights_map, PrefixedDataset):
                weights_map.dataset = FlatLoader(weights_map.dataset, flat)


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

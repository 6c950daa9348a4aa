"""Experts on disk: a forward reads those that the router picked, and the ones in use stay in memory.

accelerate brings all of an offloaded module's tensors to the device before its forward and drops them after it. Here
the packed tensors of an experts module go another way: the experts that a call needs are copied from mapped files into
slots, [slots, N, K / 2] and [slots, N, K / 32] for each projection, and its ids become numbers of slots. A slot keeps
its expert until the least recently used one has to make room. How many slots a layer has follows from the bytes that
all layers may take together. A call that needs more experts than there are slots, or whose gradient needs
them later, gets tensors of its own, which are gone after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, find_device, send_to_device
from safetensors import safe_open
from torch import Tensor, nn

from ..experts import MXFP4Experts
from .config import DEFAULT_CACHE


class Slots(NamedTuple):
    """Where experts are kept.

    Attributes:
        tensors: by the parameter's name, one expert after another.
        held: the slot of each expert, the least recently used first.
    """

    tensors: dict[str, Tensor]
    held: OrderedDict[int, int]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(next(iter(self.tensors.values())))


class StreamingHook(AlignDevicesHook):  # type: ignore[misc]  # accelerate has no type marker
    """accelerate's hook for an experts module whose packed tensors are on disk, see above.

    Attributes:
        count: slots.
        reads: experts that were copied from disk so far.
        hits: experts that were in a slot when they were needed.
    """

    def __init__(self, hook: AlignDevicesHook, module: MXFP4Experts, count: int) -> None:
        """Takes the place of a hook.

        Args:
            hook: accelerate's own, whose module has been initialised.
            module: what it is on.
            count: slots; no more than there are experts are used.
        """
        self.__dict__.update(hook.__dict__)
        self.count = min(count, module.num_routed)
        self.reads = self.hits = 0
        self._packed = [f"{proj}_{part}" for proj in module.projection_names for part in ("blocks", "scales")]
        self._biases = [f"{proj}_bias" for proj in module.projection_names if f"{proj}_bias" in module._parameters]
        self._experts: dict[str, Callable[[int], Tensor]] = {}
        self._slots: Slots | None = None
        self._outside: dict[str, nn.Parameter] = {}
        self._total = module.num_routed

    def __getstate__(self) -> dict[str, Any]:
        """Without open files and what was read from them, which a copy opens and reads for itself."""
        return {**self.__dict__, "_experts": {}, "_slots": None}

    def pre_forward(self, module: MXFP4Experts, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Puts the experts that a call needs in place; all of them where there are no ids, as for a save."""
        named = "top_k_index" in kwargs
        if not named and len(args) < 2:
            return tuple(super().pre_forward(module, *args, **kwargs))
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        ids = kwargs["top_k_index"] if named else args[1]
        wanted = [e for e in torch.unique(ids).tolist() if 0 <= e < self._total]
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        keeps = torch.is_grad_enabled() and any(value.requires_grad for value in given)
        if len(wanted) > self.count or keeps:
            slots = self._make(module, len(wanted))
        else:
            slots = self._slots = self._slots or self._make(module, self.count)
        places = self._place(slots, wanted)
        self._enter(module, slots, places)
        ids = self._renumber(ids, places, slots.size)
        if named:
            kwargs = {**kwargs, "top_k_index": ids}
        else:
            args = (args[0], ids, *args[2:])
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)

    def post_forward(self, module: MXFP4Experts, output: Any) -> Any:
        """Takes the experts out of the module again."""
        if not self._outside:
            return super().post_forward(module, output)
        for name, parameter in self._outside.items():
            module.register_parameter(name, parameter)
        self._outside = {}
        module.__dict__[module.layout.experts] = self._total
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def _make(self, module: MXFP4Experts, count: int) -> Slots:
        """Empty slots on the device that runs the module."""
        tensors = {}
        for name in self._packed:
            shape = (max(count, 1), *module.get_parameter(name).shape[1:])
            tensors[name] = torch.empty(shape, dtype=torch.uint8, device=self.execution_device)
        return Slots(tensors, OrderedDict())

    def _place(self, slots: Slots, wanted: list[int]) -> dict[int, int]:
        """The slot of each expert that is wanted, read into one if it is in none."""
        missing = []
        for e in wanted:
            if e in slots.held:
                slots.held.move_to_end(e)
            else:
                missing.append(e)
        if missing and not self._experts:
            self._experts = {name: _stack(self.weights_map, name) for name in self._packed}
        for e in missing:
            slot = len(slots.held) if len(slots.held) < slots.size else slots.held.popitem(last=False)[1]
            for name, read in self._experts.items():
                slots.tensors[name][slot].copy_(read(e))
            slots.held[e] = slot
        self.reads += len(missing)
        self.hits += len(wanted) - len(missing)
        return {e: slots.held[e] for e in wanted}

    def _enter(self, module: MXFP4Experts, slots: Slots, places: dict[int, int]) -> None:
        """Gives the module the slots for its packed parameters, with biases and a number of experts that fit them."""
        self._outside = {name: module.get_parameter(name) for name in (*self._packed, *self._biases)}
        given = dict(slots.tensors)
        experts = torch.zeros(slots.size, dtype=torch.long)
        experts[list(places.values())] = torch.tensor(list(places), dtype=torch.long)
        for name in self._biases:
            given[name] = self.weights_map[name][experts].to(self.execution_device)
        for name, tensor in given.items():
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        # Past the module's own __setattr__: the activation is still the same.
        module.__dict__[module.layout.experts] = slots.size

    def _renumber(self, ids: Tensor, places: dict[int, int], count: int) -> Tensor:
        """Ids as numbers of slots; those past the last expert stay as far past it."""
        table = torch.zeros(self._total, dtype=ids.dtype)
        table[list(places)] = torch.tensor(list(places.values()), dtype=ids.dtype)
        routed = table.to(ids.device)[ids.clamp(0, self._total - 1).long()]
        return torch.where(ids < 0, ids, torch.where(ids < self._total, routed, ids - self._total + count))


def stream_experts(model: nn.Module, cache_bytes: int = DEFAULT_CACHE) -> int:
    """Makes experts that accelerate has put on disk be read one by one, as a forward needs them.

    `from_pretrained` calls it. For a model that was dispatched by hand, as by `accelerate.disk_offload`, call it after.

    Args:
        model: with packed experts, some of which accelerate's hooks offload.
        cache_bytes: that the experts kept in memory may take, for all layers together; each gets the same part.

    Returns:
        How many experts modules are streamed.

    Raises:
        ValueError: a negative number of bytes.
    """
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes is {cache_bytes}; expected 0 or more")
    found = [module for module in model.modules() if isinstance(module, MXFP4Experts) and _is_on_disk(module)]
    for module in found:
        packed = [part for proj in module.projection_names for part in module.packed(proj)]
        one = sum(part[:1].numel() for part in packed)
        hook = module._hf_hook
        module._hf_hook = StreamingHook(hook, module, cache_bytes // len(found) // max(one, 1))
    return len(found)


def _is_on_disk(module: MXFP4Experts) -> bool:
    """Whether accelerate reads the module's packed tensors from files for each forward."""
    hook = getattr(module, "_hf_hook", None)
    if not isinstance(hook, AlignDevicesHook) or not hook.offload or module.layout.is_grouped:
        return False
    return all(_file_of(hook.weights_map, f"{proj}_blocks") is not None for proj in module.projection_names)


def _file_of(weights_map: Any, name: str) -> tuple[OffloadedWeightsLoader, str] | None:
    """What knows a tensor's file, and the name that it knows it by; None for a tensor that is in no file."""
    if isinstance(weights_map, PrefixedDataset):
        return _file_of(weights_map.dataset, weights_map.prefix + name)
    if isinstance(weights_map, OffloadedWeightsLoader) and name not in weights_map.state_dict:
        return (weights_map, name) if name in weights_map.index else None
    return None


def _stack(weights_map: Mapping[str, Tensor], name: str) -> Callable[[int], Tensor]:
    """What gives one expert of a tensor [E, ...] from its file, which is mapped and read no further than that."""
    found = _file_of(weights_map, name)
    assert found is not None
    loader, key = found
    info = loader.index[key]
    if info.get("safetensors_file") is not None:
        file: Any = safe_open(info["safetensors_file"], framework="pt")
        part = file.get_slice(info.get("weight_name", key))
        return lambda e: part[e].flatten(1)
    shape = info["shape"]
    stack = torch.from_file(str(Path(loader.save_folder, f"{key}.dat")), size=prod(shape), dtype=torch.uint8)
    return stack.view(*shape).__getitem__

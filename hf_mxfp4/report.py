"""What a model's experts are held in: the report, the assertion, and an independent check of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .experts import MXFP4Experts, find_experts
from .families import expert_lists, projections
from .linear import MXFP4Linear
from .mxfp4 import BLOCK_SIZE, SCALE_NAN
from .packed import PackedModule, dtype_names, shard_of

_CHECK_TOKENS = 4
_NARROW_ROUNDING = 1e-2
"""More than rounding to 16 bits before each product and at the end comes to."""


class NotPackedError(RuntimeError):
    """Experts that should be packed are not."""


@dataclass(frozen=True)
class ModuleReport:
    """One experts module.

    Attributes:
        name: in the model.
        experts_class: Transformers' class that it is, or stands for.
        packed: whether its experts are held in MXFP4.
        source: the layout on disk, as `formats` names it, "dense, ..." for dense weights, "-" if not known.
        source_dtypes: of the tensors on disk.
        conversion: what made them what is held.
        layout: held in memory.
        backend: what runs it.
        reason: why that backend.
        accumulator: dtype of sums.
        weights: number of expert weights.
        bytes: that they take, scales included, biases not.
        error: of the backend against an independent decode, relative (see `packed_report`); None if not checked.
        loss: what requantizing another low-bit format added, see `packed.Source`; None where nothing was requantized.
    """

    name: str
    experts_class: str
    packed: bool
    source: str
    source_dtypes: tuple[str, ...]
    conversion: str
    layout: str
    backend: str
    reason: str
    accumulator: str
    weights: int
    bytes: int
    error: float | None = None
    loss: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight takes: 4.25 packed, 16 in bfloat16."""
        return 8 * self.bytes / max(self.weights, 1)


@dataclass(frozen=True)
class PackedReport:
    """The report of a model, a row for each experts module. `str()` is a table."""

    rows: tuple[ModuleReport, ...]

    @property
    def packed(self) -> bool:
        """Whether there are experts and all of them are packed."""
        return bool(self.rows) and all(row.packed for row in self.rows)

    @property
    def bytes(self) -> int:
        """Of all experts."""
        return sum(row.bytes for row in self.rows)

    @property
    def weights(self) -> int:
        """Of all experts."""
        return sum(row.weights for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, ready for JSON."""
        rows = [{**asdict(row), "bits_per_weight": row.bits_per_weight} for row in self.rows]
        return {"packed": self.packed, "weights": self.weights, "bytes": self.bytes, "modules": rows}

    def __str__(self) -> str:
        """A table, with what is the same for all modules said once."""
        if not self.rows:
            return "no experts"
        checked = any(row.error is not None for row in self.rows)
        header = ["module", "class", "on disk", "conversion", "held", "backend", "MB", "bits/weight"]
        lines = [header + ["error"] * checked]
        for row in self.rows:
            disk = f"{row.source} ({', '.join(row.source_dtypes)})" if row.source_dtypes else row.source
            line = [row.name, row.experts_class, disk, row.conversion, row.layout, row.backend]
            line += [f"{row.bytes / 1e6:.3f}", f"{row.bits_per_weight:.2f}"]
            lines.append(line + ([f"{row.error:.1e}" if row.error is not None else "-"] if checked else []))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        reasons = {f"{row.backend}: {row.reason}; sums in {row.accumulator}" for row in self.rows}
        bits = 8 * self.bytes / self.weights
        total = f"{self.weights:,} expert weights in {self.bytes / 1e6:.3f} MB, {bits:.2f} bits each"
        return "\n".join([*table, total, *sorted(reasons)])


def packed_report(model: nn.Module, check: bool = False) -> PackedReport:
    """Reports what each experts module of a model is held in and what runs it.

    Args:
        model: any module.
        check: also run each packed module that is whole and here on a few random tokens, and give the error against
            weights that are decoded another way, bit by bit, and multiplied in float64: norm of the difference over
            norm of the result. It judges the backend, on the bytes that are held, and not how they were made.

    Returns:
        A row for each experts module, packed or dense; none for a model without experts.
    """
    rows = [_stack_row(name, module, check) for name, module in find_experts(model)]
    rows += [_list_row(name, experts, check) for name, experts in expert_lists(model, nn.Linear, MXFP4Linear)]
    return PackedReport(tuple(rows))


def assert_packed(model: nn.Module) -> None:
    """Raises unless a model has experts and every experts module is packed.

    Args:
        model: any module.

    Raises:
        NotPackedError: naming the modules that are not packed.
    """
    report = packed_report(model)
    if not report.rows:
        raise NotPackedError(f"{type(model).__name__} has no experts")
    dense = [
        f"{row.name} ({row.conversion}, {row.bits_per_weight:.0f} bits a weight)"
        for row in report.rows
        if not row.packed
    ]
    if dense:
        raise NotPackedError(f"{len(dense)} of {len(report.rows)} experts modules are not packed: {', '.join(dense)}")


def _stack_row(name: str, module: nn.Module, check: bool) -> ModuleReport:
    """The row of an experts module whose projections hold all experts."""
    if isinstance(module, MXFP4Experts):
        return _packed_row(name, module.dense_class, [module], check)
    device = next(module.parameters()).device
    return _dense_row(name, type(module), list(projections(module).values()), device)


def _list_row(name: str, experts: nn.ModuleList, check: bool) -> ModuleReport:
    """The row of a list of small MLPs, packed if all their linear layers are."""
    dense = [layer.weight for layer in experts.modules() if isinstance(layer, nn.Linear)]
    if dense:
        return _dense_row(name, type(experts[0]), dense, dense[0].device)
    return _packed_row(name, type(experts[0]), [m for m in experts.modules() if isinstance(m, MXFP4Linear)], check)


def _packed_row(name: str, experts_class: type, modules: Sequence[PackedModule], check: bool) -> ModuleReport:
    parts = [part for module in modules for proj in module.projection_names for part in module.packed(proj)]
    device = parts[0].device
    choice = modules[0].backend_choice(device.type if device.type != "meta" else "cpu")
    source = modules[0].source
    checked = check and device.type != "meta" and not any(shard_of(part)[1] for part in parts)
    error = max(map(_backend_error, modules)) if checked else None
    return ModuleReport(
        name=name,
        experts_class=experts_class.__name__,
        packed=all(part.dtype is torch.uint8 for part in parts),
        source=source.format if source else "-",
        source_dtypes=source.dtypes if source else (),
        conversion=source.conversion if source else "-",
        layout=f"uint8 blocks and scales on {device}",
        backend=choice.name,
        reason=choice.reason,
        accumulator="float32",
        weights=sum(2 * part.numel() for part in parts[::2]),
        bytes=sum(part.numel() for part in parts),
        error=error,
        loss=max((m.source.loss for m in modules if m.source and m.source.loss is not None), default=None),
    )


def _dense_row(name: str, experts_class: type, weights: Sequence[Tensor], device: torch.device) -> ModuleReport:
    (dtype,) = dtype_names(weights[:1])
    return ModuleReport(
        name=name,
        experts_class=experts_class.__name__,
        packed=False,
        source="-",
        source_dtypes=(),
        conversion=f"dense {dtype}",
        layout=f"{dtype} on {device}",
        backend="transformers",
        reason="not packed",
        accumulator="-",
        weights=sum(weight.numel() for weight in weights),
        bytes=sum(weight.numel() * weight.element_size() for weight in weights),
    )


def _backend_error(module: PackedModule) -> float:
    """Relative error of the module on random tokens against an independent decode.

    In float32, and where weights would be of a narrower dtype in that one too, since other kernels may run it: its
    error is given if it is more than rounding to that dtype explains.
    """
    error = _error_in(module, torch.float32)
    if module.dense_dtype.itemsize < 4:
        narrow = _error_in(module, module.dense_dtype)
        if not narrow <= max(error, _NARROW_ROUNDING):
            return narrow
    return error


def _error_in(module: PackedModule, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if isinstance(module, MXFP4Experts):
            got, expected = _run_experts(module, generator, dtype)
        else:
            assert isinstance(module, MXFP4Linear)
            got, expected = _run_linear(module, generator, dtype)
    scale = expected.norm()
    return float((got - expected).norm() / (scale if scale > 0 else 1))


def _run_linear(module: MXFP4Linear, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the layer gives for random tokens, and what it should give, in float64."""
    blocks, scales = module.packed("weight")
    tokens = torch.randn(_CHECK_TOKENS, module.in_features, generator=generator).to(dtype)
    expected = tokens.double() @ _decode_bitwise(blocks.cpu(), scales.cpu()).T
    if module.bias is not None:
        expected += module.bias.double().cpu()
    return module(tokens.to(blocks.device)).double().cpu(), expected


def _run_experts(module: MXFP4Experts, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the module gives for random tokens, two experts each, and what it should give, in float64."""
    blocks = module.packed(module.projection_names[0]).blocks
    count, width = blocks.shape[0], 2 * blocks.shape[2]
    grouped = module.layout.is_grouped
    tokens = torch.randn(count if grouped else _CHECK_TOKENS, width, generator=generator).to(dtype)
    if grouped:
        ids, weights = torch.arange(count)[:, None], torch.ones(count, 1)
        routes: tuple[Tensor, ...] = ()
    else:
        ids = torch.stack([torch.randperm(count, generator=generator)[: min(2, count)] for _ in tokens])
        weights = torch.rand(ids.shape, generator=generator)
        routes = (ids.to(blocks.device), weights.to(blocks.device))
    got = module(tokens.to(blocks.device), *routes).double().cpu()
    expected = torch.zeros_like(got)
    for t, j in product(range(ids.shape[0]), range(ids.shape[1])):
        expected[t] += weights[t, j].double() * _expert_output(module, int(ids[t, j]), tokens[t].double())
    return got, expected


def _expert_output(module: MXFP4Experts, expert: int, token: Tensor) -> Tensor:
    """One expert on one token in float64 on the CPU, with the module's own activation: [H]."""
    value: Tensor = token
    for i, proj in enumerate(module.projection_names):
        blocks, scales = (part[expert].cpu() for part in module.packed(proj))
        value = _decode_bitwise(blocks, scales) @ value
        bias = getattr(module, f"{proj}_bias", None)
        if bias is not None:
            value = value + bias[expert].double().cpu()
        if i == 0:
            value = module._apply_gate(value[None])[0] if module.layout.has_gate else module.act_fn(value)
    if getattr(module, "has_post_expert_norm", False):
        value = module.post_expert_norm(value.float()).double()
    return value


def _decode_bitwise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes by the fields of E2M1 (sign, two exponent bits, one mantissa bit) in float64, sharing no table."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    exponent, mantissa = codes >> 1 & 3, codes & 1
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1).double())
    scale = (2.0 ** (scales.double() - 127)).masked_fill(scales == SCALE_NAN, torch.nan)
    return torch.where(codes >= 8, -magnitude, magnitude).double() * scale.repeat_interleave(BLOCK_SIZE, dim=-1)

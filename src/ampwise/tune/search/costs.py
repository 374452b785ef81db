"""Cost and gain of an assignment: derived from FLOPs and bits, from datasheets, and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampwise.hardware import Gpu
from ampwise.tune.search.format_choices import FormatChoice
from ampwise.tune.search.units import SearchUnit

__all__ = ["FormatGain", "estimate_gain", "unit_costs"]

FULL_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatGain:
    """Gain over FP32. Times cover matmuls only, at the peaks of a datasheet."""

    cost: float  # bits of operands, weighted by FLOPs; FP32 is 1
    gpu: str | None
    faster_than_fp32: float | None
    faster_than_16_bits: float | None
    why_no_time: str | None
    kept_bytes: int | None  # saved for the backward pass, for one batch
    kept_bytes_fp32: int | None


def unit_costs(units: Sequence[SearchUnit], choices: Sequence[FormatChoice]) -> tuple[tuple[float, ...], ...]:
    """Return the cost of each unit in each format: its share of the FLOPs times the share of FP32's bits."""
    whole = sum(unit.flops for unit in units)
    return tuple(tuple(unit.flops / whole * choice.bits / FULL_BITS for choice in choices) for unit in units)


def estimate_gain(
    units: Sequence[SearchUnit],
    chosen: Sequence[FormatChoice],
    choices: Sequence[FormatChoice],
    gpu: Gpu | None,
    kept: tuple[int, int] | None,
) -> FormatGain:
    """Compute the gain of these formats; ``kept``: bytes saved for the backward pass, here and in FP32."""
    whole = sum(unit.flops for unit in units)
    cost = sum(unit.flops / whole * choice.bits / FULL_BITS for unit, choice in zip(units, chosen, strict=True))
    lacking = _lacking(gpu, chosen, choices)
    own = None if lacking else _seconds(units, [choice.peak for choice in chosen], gpu)
    wide = _seconds(units, ["fp32"] * len(units), gpu)
    half = _seconds(units, [choices[0].region] * len(units), gpu)  # the narrowest has a 16-bit region
    return FormatGain(
        cost=cost,
        gpu=None if gpu is None else gpu.id,
        faster_than_fp32=wide / own if own and wide else None,
        faster_than_16_bits=half / own if own and half else None,
        why_no_time=lacking,
        kept_bytes=None if kept is None else kept[0],
        kept_bytes_fp32=None if kept is None else kept[1],
    )


def _lacking(gpu: Gpu | None, chosen: Sequence[FormatChoice], choices: Sequence[FormatChoice]) -> str | None:
    if gpu is None:
        return "no GPU was given"
    missing = [choice for choice in choices if choice in chosen and gpu.figure(choice.peak) is None]
    if not missing:
        return None
    if gpu.has_tensor_cores(missing[0].peak) is False:
        return f"{gpu.name} has no tensor cores for {missing[0].name}"
    return f"the peak of {gpu.name} for {missing[0].name} is unknown"


def _seconds(units: Sequence[SearchUnit], formats: Sequence[str], gpu: Gpu | None) -> float | None:
    if gpu is None:
        return None
    peaks = [gpu.figure(name) for name in formats]
    if any(peak is None for peak in peaks):
        return None
    return sum(unit.flops / peak.value for unit, peak in zip(units, peaks, strict=True) if peak is not None)

"""Time and memory of a run by part, as far as the record has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.formatting import format_bytes, format_short, read_number
from ampwise.report.run_facts import as_mapping, mapping

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = [
    "DevicePeakMemory",
    "MemoryUsage",
    "TotalShare",
    "device_time_by_kind",
    "largest_matmuls",
    "memory",
    "waiting_lines",
    "work_by_precision",
]

TIME_NAMES = {  # names in the record: names to show
    "matrix": "matmuls",
    "casts": "casts between precisions",
    "normalisation": "normalisation",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "communication": "communication",
    "copies": "copies",
    "other": "other",
}
MEMORY_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
}
OTHER_MEMORY = "activations and other"
MOST_MATMULS = 12
MOST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalShare:
    """A part of a total, for a stacked bar."""

    name: str
    amount: float
    share: float  # of the total
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeakMemory:
    """Peak memory of a device, formatted."""

    name: str
    allocated: str
    reserved: str
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Memory by what it holds. ``whole`` describes the total of the parts."""

    parts: list[TotalShare]
    whole: str
    devices: list[DevicePeakMemory]
    host_peak: str  # empty if unknown


def device_time_by_kind(run: Run) -> list[TotalShare]:
    """Return the device's time by kind of work in the profiled steps, largest first."""
    found = _amounts(mapping(run, "timing").get("time_by_kind"))
    return _parts({TIME_NAMES.get(name, name): seconds for name, seconds in found.items()})


def work_by_precision(run: Run) -> list[TotalShare]:
    """Return the matmul work by precision."""
    return _parts(_amounts(mapping(run, "timing").get("flops_by_precision")))


def largest_matmuls(run: Run) -> list[list[str]]:
    """Return the largest matmuls: operation, shape, precision, count, share of the work, and notes."""
    found = mapping(run, "timing").get("matrix_products")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    work = sum(_amount(row.get("flops")) for row in rows)
    return [
        [
            *(str(row.get(part) or "") for part in ("op", "shape", "precision")),
            format_short(row.get("count", "")),
            f"{_amount(row.get('flops')) / work:.1%}" if work else "",
            "not aligned" if row.get("aligned") is False else "",
        ]
        for row in rows[:MOST_MATMULS]
    ]


def waiting_lines(run: Run) -> list[tuple[str, str]]:
    """Return the script lines that waited for data or synced with the device."""
    times = mapping(run, "timing")
    data = [(line, f"{seconds:.3g} s for data") for line, seconds in _worst(times.get("data_waits"))]
    device = [(line, f"{count:,.0f} × device sync") for line, count in _worst(times.get("syncs"))]
    return data + device


def memory(run: Run) -> MemoryUsage | None:
    """Return what took up memory; None if nothing was measured."""
    found = mapping(run, "memory")
    held = {words: _amounts(found.get(name)) for name, words in MEMORY_NAMES.items()}
    amounts = {words: sum(formats.values()) for words, formats in held.items() if formats}
    notes = {words: _formats(formats) for words, formats in held.items()}
    devices = {name: row for name, row in as_mapping(found.get("devices")).items() if isinstance(row, Mapping)}
    only = next(iter(devices.values())) if len(devices) == 1 else {}
    rest = read_number(only.get("rest"))
    if rest is not None and rest > 0:
        amounts[OTHER_MEMORY] = rest
    host = read_number(found.get("host_peak"))
    if not amounts and not devices and host is None:
        return None
    whole = f"of {format_bytes(sum(amounts.values()))}" + (" at the device's peak" if OTHER_MEMORY in amounts else "")
    return MemoryUsage(
        parts=_parts(amounts, notes),
        whole=whole,
        devices=[_device(str(name), row) for name, row in devices.items()],
        host_peak="" if host is None else format_bytes(host),
    )


def _device(name: str, row: Mapping[str, Any]) -> DevicePeakMemory:
    known = {part: read_number(row.get(part)) for part in ("peak_allocated", "peak_reserved", "total")}
    text = {part: "" if amount is None else format_bytes(amount) for part, amount in known.items()}
    return DevicePeakMemory(
        name=name, allocated=text["peak_allocated"], reserved=text["peak_reserved"], total=text["total"]
    )


def _formats(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(amount)}" for name, amount in amounts.items())


def _parts(amounts: Mapping[str, float], notes: Mapping[str, str] | None = None) -> list[TotalShare]:
    whole = sum(amounts.values())
    ordered = sorted(amounts.items(), key=lambda pair: -pair[1])
    return [
        TotalShare(name=name, amount=amount, share=amount / whole, note=(notes or {}).get(name, ""))
        for name, amount in ordered
        if amount > 0
    ]


def _worst(found: object) -> list[tuple[str, float]]:
    return sorted(_amounts(found).items(), key=lambda pair: -pair[1])[:MOST_LINES]


def _amounts(found: object) -> dict[str, float]:
    """Return the positive, finite amounts of a mapping from names to amounts."""
    return {str(name): amount for name, value in as_mapping(found).items() if (amount := _amount(value)) > 0}


def _amount(value: object) -> float:
    found = read_number(value)
    return found if found is not None and 0 < found < float("inf") else 0.0

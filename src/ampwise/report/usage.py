"""Where time and memory went, part by part, as far as a record says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.facts import as_mapping, mapping
from ampwise.report.wording import number, short, size

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["Device", "Memory", "Part", "kinds_of_time", "memory", "precisions_of_work", "products", "waiting_lines"]

KINDS = {  # what the watch calls them → what a person does
    "matrix": "matrix products",
    "casts": "casts between precisions",
    "normalisation": "normalisation",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "communication": "communication",
    "copies": "copies",
    "other": "other",
}
OWNERS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
}
REST = "activations and the rest"
MOST_PRODUCTS = 12
MOST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a whole, for a bar."""

    name: str
    amount: float
    share: float  # of the whole
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """How much memory of a device was in use at its peak, in words."""

    name: str
    allocated: str
    reserved: str
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What took up memory. ``whole``: what the parts are of, in words."""

    parts: list[Part]
    whole: str
    devices: list[Device]
    host_peak: str  # empty where nobody knows


def kinds_of_time(run: Run) -> list[Part]:
    """The device's time by kind of work, in the steps that were profiled; the most first."""
    found = _amounts(mapping(run, "timing").get("time_by_kind"))
    return _parts({KINDS.get(name, name): seconds for name, seconds in found.items()})


def precisions_of_work(run: Run) -> list[Part]:
    """The matrix work by precision."""
    return _parts(_amounts(mapping(run, "timing").get("flops_by_precision")))


def products(run: Run) -> list[list[str]]:
    """The largest matrix products: what, of what size, in which precision, how often, its share of the work."""
    found = mapping(run, "timing").get("matrix_products")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    work = sum(_amount(row.get("flops")) for row in rows)
    return [
        [
            *(str(row.get(part) or "") for part in ("op", "shape", "precision")),
            short(row.get("count", "")),
            f"{_amount(row.get('flops')) / work:.1%}" if work else "",
            "not aligned" if row.get("aligned") is False else "",
        ]
        for row in rows[:MOST_PRODUCTS]
    ]


def waiting_lines(run: Run) -> list[tuple[str, str]]:
    """The lines of the script at which it waited, for data and for the device."""
    times = mapping(run, "timing")
    data = [(line, f"{seconds:.3g} s for data") for line, seconds in _worst(times.get("data_waits"))]
    device = [(line, f"{count:,.0f} × for the device") for line, count in _worst(times.get("syncs"))]
    return data + device


def memory(run: Run) -> Memory | None:
    """None where nothing was measured."""
    found = mapping(run, "memory")
    held = {words: _amounts(found.get(name)) for name, words in OWNERS.items()}
    amounts = {words: sum(formats.values()) for words, formats in held.items() if formats}
    notes = {words: _formats(formats) for words, formats in held.items()}
    devices = {name: row for name, row in as_mapping(found.get("devices")).items() if isinstance(row, Mapping)}
    only = next(iter(devices.values())) if len(devices) == 1 else {}
    rest = number(only.get("rest"))
    if rest is not None and rest > 0:
        amounts[REST] = rest
    host = number(found.get("host_peak"))
    if not amounts and not devices and host is None:
        return None
    whole = f"of {size(sum(amounts.values()))}" + (" at the device's peak" if REST in amounts else "")
    return Memory(
        parts=_parts(amounts, notes),
        whole=whole,
        devices=[_device(str(name), row) for name, row in devices.items()],
        host_peak="" if host is None else size(host),
    )


def _device(name: str, row: Mapping[str, Any]) -> Device:
    known = {part: number(row.get(part)) for part in ("peak_allocated", "peak_reserved", "total")}
    told = {part: "" if amount is None else size(amount) for part, amount in known.items()}
    return Device(name=name, allocated=told["peak_allocated"], reserved=told["peak_reserved"], total=told["total"])


def _formats(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(amount)}" for name, amount in amounts.items())


def _parts(amounts: Mapping[str, float], notes: Mapping[str, str] | None = None) -> list[Part]:
    whole = sum(amounts.values())
    ordered = sorted(amounts.items(), key=lambda pair: -pair[1])
    return [
        Part(name=name, amount=amount, share=amount / whole, note=(notes or {}).get(name, ""))
        for name, amount in ordered
        if amount > 0
    ]


def _worst(found: object) -> list[tuple[str, float]]:
    return sorted(_amounts(found).items(), key=lambda pair: -pair[1])[:MOST_LINES]


def _amounts(found: object) -> dict[str, float]:
    """Of a mapping from names to amounts those that make sense."""
    return {str(name): amount for name, value in as_mapping(found).items() if (amount := _amount(value)) > 0}


def _amount(value: object) -> float:
    found = number(value)
    return found if found is not None and 0 < found < float("inf") else 0.0

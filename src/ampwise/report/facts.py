"""What a run wrote down about itself, read with care: a record may come from a later version, or from anyone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.wording import duration, number, short

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = [
    "Setting",
    "as_mapping",
    "environment",
    "mapping",
    "optimizer_names",
    "rows",
    "sentences",
    "settings",
    "timing",
]

TIMES = {  # what a person asks of it; JSON has the rest
    "seconds_per_step": "time a step",
    "half_share": "matrix work in half precision",
    "cast_share": "time in casts",
    "data_wait_share": "time waiting for data",
    "syncs_per_step": "waits for the device, a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of the scaler that the counts suggest, and why."""

    name: str
    value: Any
    reason: str = ""


def sentences(run: Run, name: str) -> list[str]:
    """A fact that is a list of sentences; none where it is anything else."""
    found = run.facts.get(name)
    return [str(sentence) for sentence in found] if isinstance(found, (list, tuple)) else []


def settings(run: Run) -> list[Setting]:
    """The suggested settings of the scaler."""
    return [
        Setting(name=str(row["name"]), value=row["value"], reason=str(row.get("reason") or ""))
        for row in rows(run, "settings")
        if "name" in row and "value" in row
    ]


def optimizer_names(run: Run) -> dict[int, str]:
    """The optimizers in words, "AdamW of Generator", by number; of two that read the same, each with its number."""
    told = {row["index"]: _of_model(row) for row in rows(run, "optimizers") if type(row.get("index")) is int}
    times = Counter(told.values())
    return {index: name if times[name] == 1 else f"{name}, optimizer {index}" for index, name in told.items() if name}


def timing(run: Run) -> list[tuple[str, str]]:
    """Where time went: a name and a value in words for each number that was measured."""
    found = mapping(run, "timing")
    return [(words, _amount(name, found[name])) for name, words in TIMES.items() if _known(found.get(name))]


def environment(run: Run) -> dict[str, Any]:
    """Where it ran: what was known before it began, and what torch said at its end."""
    of_torch = {name: value for name, value in mapping(run, "torch").items() if value is not None}
    wrote = run.manifest.get("ampwise")
    return {**run.environment, **of_torch, **({} if wrote is None else {"ampwise": wrote})}


def mapping(run: Run, name: str) -> Mapping[str, Any]:
    """A fact that has parts; empty where it is anything else."""
    return as_mapping(run.facts.get(name))


def as_mapping(value: object) -> Mapping[str, Any]:
    """A part of a fact that has parts itself."""
    return value if isinstance(value, Mapping) else {}


def rows(run: Run, name: str) -> list[Mapping[str, Any]]:
    """A fact that is a list of things with parts; what is no such thing is left out."""
    found = run.facts.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, (list, tuple)) else []


def _text(row: Mapping[str, Any], part: str) -> str:
    return str(row.get(part) or "")


def _of_model(row: Mapping[str, Any]) -> str:
    return " of ".join(text for text in (_text(row, "name"), _text(row, "model")) if text)


def _known(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def _amount(name: str, value: object) -> str:
    found = number(value)
    if found is None or isinstance(value, str):
        return short(value)
    if name.startswith("seconds"):
        return duration(found)
    return f"{found:.1%}" if "share" in name else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

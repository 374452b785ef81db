"""Read the facts that a run recorded about itself; the record is untrusted and may come from a later version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampwise.report.formatting import format_duration, format_short, read_number

if TYPE_CHECKING:
    from ampwise.runs.reader import Run

__all__ = [
    "SuggestedSetting",
    "as_mapping",
    "environment",
    "mapping",
    "optimizer_names",
    "rows",
    "sentences",
    "settings",
    "timing",
]

TIMING_NAMES = {  # the most important ones; JSON has all
    "seconds_per_step": "time per step",
    "half_share": "matmuls in half precision",
    "cast_share": "time in casts",
    "data_wait_share": "time waiting for data",
    "syncs_per_step": "device syncs per step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedSetting:
    """A suggested GradScaler setting, and the reason."""

    name: str
    value: Any
    reason: str = ""


def sentences(run: Run, name: str) -> list[str]:
    """Return a fact that is a list of sentences; an empty list if it is anything else."""
    found = run.facts.get(name)
    return [str(sentence) for sentence in found] if isinstance(found, (list, tuple)) else []


def settings(run: Run) -> list[SuggestedSetting]:
    """Return the suggested GradScaler settings."""
    return [
        SuggestedSetting(name=str(row["name"]), value=row["value"], reason=str(row.get("reason") or ""))
        for row in rows(run, "settings")
        if "name" in row and "value" in row
    ]


def optimizer_names(run: Run) -> dict[int, str]:
    """Return the names of the optimizers, "AdamW of Generator", by index; equal names also contain the index."""
    names = {row["index"]: _of_model(row) for row in rows(run, "optimizers") if type(row.get("index")) is int}
    times = Counter(names.values())
    return {index: name if times[name] == 1 else f"{name}, optimizer {index}" for index, name in names.items() if name}


def timing(run: Run) -> list[tuple[str, str]]:
    """Return where time went: name and formatted value of each measured number."""
    found = mapping(run, "timing")
    return [(words, _amount(name, found[name])) for name, words in TIMING_NAMES.items() if _known(found.get(name))]


def environment(run: Run) -> dict[str, Any]:
    """Return the environment of a run: what was recorded at its start, and torch's facts from its end."""
    of_torch = {name: value for name, value in mapping(run, "torch").items() if value is not None}
    wrote = run.manifest.get("ampwise")
    return {**run.environment, **of_torch, **({} if wrote is None else {"ampwise": wrote})}


def mapping(run: Run, name: str) -> Mapping[str, Any]:
    """Return a fact that is a mapping; an empty mapping if it is anything else."""
    return as_mapping(run.facts.get(name))


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a value that is a mapping; an empty mapping if it is anything else."""
    return value if isinstance(value, Mapping) else {}


def rows(run: Run, name: str) -> list[Mapping[str, Any]]:
    """Return a fact that is a list of mappings; items of other types are dropped."""
    found = run.facts.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, (list, tuple)) else []


def _text(row: Mapping[str, Any], part: str) -> str:
    return str(row.get(part) or "")


def _of_model(row: Mapping[str, Any]) -> str:
    return " of ".join(text for text in (_text(row, "name"), _text(row, "model")) if text)


def _known(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def _amount(name: str, value: object) -> str:
    found = read_number(value)
    if found is None or isinstance(value, str):
        return format_short(value)
    if name.startswith("seconds"):
        return format_duration(found)
    return f"{found:.1%}" if "share" in name else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

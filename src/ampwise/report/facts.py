"""What a run wrote down about itself, read with care: a record may come from a later version, or from anyone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.record.reader import Run

__all__ = ["Setting", "modules", "one_line", "sentences", "settings", "short", "timing"]

TIMES = {  # what a person asks of it; JSON has the rest
    "seconds_per_step": "seconds a step",
    "half_share": "matrix work in half precision",
    "cast_share": "time in casts",
    "data_wait_share": "time waiting for data",
    "syncs_per_step": "waits for the device, a step",
}
LONGEST = 200  # characters of a value of evidence: a line is for reading


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
        for row in _rows(run, "settings")
        if "name" in row and "value" in row
    ]


def modules(run: Run) -> list[tuple[str, str, str]]:
    """Name, kind and precision of the modules that were watched."""
    parts = ("name", "kind", "precision")
    return [(text[0], text[1], text[2]) for row in _rows(run, "modules") for text in [[_text(row, p) for p in parts]]]


def timing(run: Run) -> list[tuple[str, str]]:
    """Where time went: a name and a value in words for each number that was measured."""
    found = run.facts.get("timing")
    if not isinstance(found, Mapping):
        return []
    return [(words, _amount(name, found[name])) for name, words in TIMES.items() if _known(found.get(name))]


def short(value: object) -> str:
    """A value in few characters: six digits are what a person compares; JSON has them all."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def one_line(evidence: Mapping[str, Any]) -> str:
    """The evidence of a finding.

    >>> one_line({"norm": 1.5258789e-05, "scale": 65536})
    'norm: 1.52588e-05, scale: 65536'
    """
    return ", ".join(f"{key}: {short(value)}" for key, value in evidence.items())


def _rows(run: Run, name: str) -> list[Mapping[str, Any]]:
    found = run.facts.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, (list, tuple)) else []


def _text(row: Mapping[str, Any], part: str) -> str:
    return str(row.get(part) or "")


def _known(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def _amount(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return short(value)
    return f"{value:.1%}" if "share" in name else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

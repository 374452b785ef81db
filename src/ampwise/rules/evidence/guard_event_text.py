"""Text helpers for the events of a guarded run: counts, times, and external texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.rules.evidence.guard_events import GuardEvent

__all__ = ["event_evidence", "name_list", "one_line", "step_count_text", "streak_text", "time_text"]

LONGEST = 300  # characters of an external text
NAMED = 3  # names listed in full


def one_line(text: str) -> str:
    """Return an external text, such as an error message, on one line of limited length.

    >>> one_line("  no space\\n left on device ")
    'no space left on device'
    """
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def step_count_text(count: int) -> str:
    """
    >>> step_count_text(1), step_count_text(1200)
    ('1 step', '1,200 steps')
    """
    return "1 step" if count == 1 else f"{count:,} steps"


def streak_text(count: int, what: str) -> str:
    """Return the text for a repeated failure; empty for the first.

    >>> streak_text(1, "failure"), streak_text(2, "failure"), streak_text(13, "bad step")
    ('', ', the 2nd failure in a row', ', the 13th bad step in a row')
    """
    if count < 2:
        return ""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f", the {count:,}{ending} {what} in a row"


def time_text(seconds: float) -> str:
    """
    >>> time_text(0.0042), time_text(0.25), time_text(3.04), time_text(90), time_text(7260)
    ('4.2 ms', '250 ms', '3.0 s', '1.5 min', '2.0 h')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def name_list(names: Iterable[str], count: int | None = None) -> str:
    """Return the first few names in backquotes, and how many more there are.

    >>> name_list(["a", "b"]), name_list("abcde"), name_list(["head"], count=9)
    ('`a` and `b`', '`a`, `b`, `c` and 2 more', '`head` and 8 more')
    """
    given = list(names)
    shown = [f"`{one_line(name)}`" for name in given[:NAMED]]
    more = max(count or 0, len(given)) - len(shown)
    parts = [*shown, *([f"{more:,} more"] if more else [])]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def event_evidence(fault: GuardEvent) -> dict[str, Any]:
    """Return all known fields except the step, which is part of the finding's place."""
    return {name: value for name, value in asdict(fault).items() if name != "step" and value not in (None, "", ())}

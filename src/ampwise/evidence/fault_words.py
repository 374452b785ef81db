"""Words for what happened to a guarded run: counts, times, and texts that came from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.evidence.faults import Fault

__all__ = ["evidence_of", "in_a_row", "named", "one_line", "steps", "time_text"]

LONGEST = 300  # characters of a text that came from elsewhere
NAMED = 3  # of many


def one_line(text: str) -> str:
    """An error's or a file's text, which may have any characters and any length.

    >>> one_line("  no room\\n on device ")
    'no room on device'
    """
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def steps(count: int) -> str:
    """
    >>> steps(1), steps(1200)
    ('1 step', '1,200 steps')
    """
    return "1 step" if count == 1 else f"{count:,} steps"


def in_a_row(count: int, what: str) -> str:
    """What follows a failure that was not the first; nothing for the first.

    >>> in_a_row(1, "failure"), in_a_row(2, "failure"), in_a_row(13, "bad step")
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


def named(names: Iterable[str], count: int | None = None) -> str:
    """The first few, in backquotes, and how many more there are.

    >>> named(["a", "b"]), named("abcde"), named(["head"], count=9)
    ('`a` and `b`', '`a`, `b`, `c` and 2 more', '`head` and 8 more')
    """
    given = list(names)
    shown = [f"`{one_line(name)}`" for name in given[:NAMED]]
    more = max(count or 0, len(given)) - len(shown)
    parts = [*shown, *([f"{more:,} more"] if more else [])]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def evidence_of(fault: Fault) -> dict[str, Any]:
    """All of its numbers and names, but those that are not known and the step, which is its place."""
    return {name: value for name, value in asdict(fault).items() if name != "step" and value not in (None, "", ())}

"""Behaviour of the loss scale: what is by design, and what is not.

A scaler doubles its scale after ``growth_interval`` clean steps, overflows, halves it again and loses that one step: so
it stays near the highest scale that works. One skip per interval is by design.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ampwise.rules.evidence.gradient_health import GradientHealth
from ampwise.rules.evidence.streaks import LONG, Streak

if TYPE_CHECKING:
    from ampwise.rules.evidence.rows import StepRow

__all__ = ["Collapse", "Oscillation", "collapse", "oscillation", "skip_share"]

AT_LEAST = 40  # steps after the search that a fraction needs
GROWTHS = 5  # undone growths that make a pattern
UNDONE = 0.8  # of the growths
SOON = 2  # steps within which a skip undoes a growth
OFTEN = 0.05  # of all steps skipped: more than the design costs with any growth interval of 20 or more
BEYOND_DESIGN = 4  # times one skip per interval
NOTICEABLE = 0.01  # of all steps: less is negligible
FALLS = 3  # of the scale that count as repeated
NO_SCALING = 1.0


@dataclass(frozen=True, slots=True)
class Collapse:
    """The scale fell so far that it has no effect, or gradients overflowed many times in a row."""

    step: int
    from_scale: float
    to_scale: float
    in_a_row: int


@dataclass(frozen=True, slots=True)
class Oscillation:
    """The scale repeatedly grows, overflows immediately and falls."""

    growths: int
    undone: int
    skipped: float  # fraction of steps


def collapse(health: GradientHealth) -> Collapse | None:
    """Return the worst collapse, if there was one."""
    worst = None
    for streak in _in_a_row(health):
        if streak.first_scale is None or streak.lowest_scale is None:
            continue
        below = streak.lowest_scale < NO_SCALING and health.streaks.total - 1 + streak.count >= FALLS
        long = streak.after_good and streak.count >= LONG
        if (below or long) and (worst is None or streak.count > worst.in_a_row):
            worst = Collapse(streak.first, streak.first_scale, streak.lowest_scale, streak.count)
    return worst


def _in_a_row(health: GradientHealth) -> list[Streak]:
    """Return runs of consecutive bad steps, whatever was bad about each."""
    joined: list[Streak] = []
    for streak in health.streaks.all:
        if joined and streak.first == joined[-1].last + 1:
            joined[-1] = joined[-1].followed_by(streak)
        else:
            joined.append(streak)
    return joined


def skip_share(health: GradientHealth) -> float | None:
    """Return the fraction of recent steps that were skipped; None if there are too few, or the scale search is not
    over.
    """
    rows = health.window
    return sum(row.skipped for row in rows) / len(rows) if len(rows) >= AT_LEAST else None


def oscillation(health: GradientHealth) -> Oscillation | None:
    """Return the oscillation if skips undo growths far more often than by design."""
    share = skip_share(health)
    if share is None or share < NOTICEABLE:
        return None
    rows = list(health.window)
    growths = [at for at, (before, after) in enumerate(pairwise(rows), start=1) if _grew(before, after)]
    undone = sum(any(row.skipped for row in rows[at : at + SOON]) for at in growths)
    if undone < GROWTHS or undone < UNDONE * len(growths):
        return None
    by_design = 1 / health.growth_interval if health.growth_interval else None
    beyond = by_design is not None and share > BEYOND_DESIGN * by_design
    return Oscillation(len(growths), undone, share) if share > OFTEN or beyond else None


def _grew(before: StepRow, after: StepRow) -> bool:
    return before.scale is not None and after.scale is not None and after.scale > before.scale

"""Find a cheap assignment that passes, starting from all wide, in few trials.

An assignment has an index per unit: 0 is the cheapest format, the last one the widest. All-widest passes. A wider
format is assumed never to be worse; if that fails, the result still passes.

If all-cheapest fails, the formats are tried one after the other, from wide to narrow: which units have to stay wide
so that the rest pass? Units are ordered by sensitivity relative to the cost of raising them: keep the first one,
the first two, four, eight, until it passes, then bisect. If the order is right, these are the units. If it is wrong,
the necessary ones among them are found by halving again (QuickXplain): k of n in at most 2k·log2(n/k) + 2k trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")
Assignment = tuple[int, ...]
Passes = Callable[[Assignment], bool]

LEAST_COST = 1e-12  # assumed extra cost of a wider format that costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatLadder:
    """The formats that units can have, with their costs and estimated sensitivities."""

    formats: int  # number of formats
    lowest: Assignment  # the cheapest format of each unit
    costs: tuple[tuple[float, ...], ...]  # of each unit in each format
    scores: tuple[tuple[float, ...], ...]  # of each unit in each format: its estimated sensitivity

    @property
    def widest(self) -> Assignment:
        """The widest assignment, which passes."""
        return (self.formats - 1,) * len(self.lowest)

    def cost(self, assignment: Assignment) -> float:
        """Return the cost over all units."""
        return sum(costs[place] for costs, place in zip(self.costs, assignment, strict=True))

    def alone(self, unit: int, place: int) -> Assignment:
        """Return the assignment with one unit at a format, and the others widest."""
        return tuple(place if other == unit else at for other, at in enumerate(self.widest))

    def with_score(self, unit: int, place: int, score: float) -> FormatLadder:
        """Replace an estimate by a measurement."""
        own = (*self.scores[unit][:place], score, *self.scores[unit][place + 1 :])
        return replace(self, scores=(*self.scores[:unit], own, *self.scores[unit + 1 :]))

    def most_in_need(self, assignment: Assignment) -> list[int]:
        """Return units that could be wider than here, those first that need it most relative to its cost."""
        above = [unit for unit, at in enumerate(assignment) if at < self.formats - 1]
        return sorted(above, key=lambda unit: -self.need(unit, assignment[unit]))

    def need(self, unit: int, place: int) -> float:
        """Return a unit's sensitivity to a format, relative to the cost of the next wider one."""
        more = self.costs[unit][place + 1] - self.costs[unit][place]
        return self.scores[unit][place] / max(more, LEAST_COST)


def cheapest_passing(ladder: FormatLadder, passes: Passes) -> Assignment:
    """Return an assignment that passes, in which no unit can have the next narrower format.

    >>> ladder = FormatLadder(formats=2, lowest=(0,) * 4, costs=((1.0, 2.0),) * 4, scores=((1.0, 0.0),) * 4)
    >>> cheapest_passing(ladder, lambda assignment: assignment[2] == 1)
    (0, 0, 1, 0)
    """
    if passes(ladder.lowest):
        return ladder.lowest
    current = ladder.widest
    for place in reversed(range(ladder.formats - 1)):
        current = _level(ladder, current, place, passes)
    return current


def _level(ladder: FormatLadder, current: Assignment, place: int, passes: Passes) -> Assignment:
    """Move as many units as possible from the format above ``place`` to that at it."""
    movable = [unit for unit, at in enumerate(current) if at == place + 1 and ladder.lowest[unit] <= place]

    def lowered(kept: Sequence[int]) -> Assignment:
        down = set(movable) - set(kept)
        return tuple(at - (unit in down) for unit, at in enumerate(current))

    ordered = sorted(movable, key=lambda unit: -ladder.need(unit, place))
    return lowered(minimal_subset(ordered, lambda kept: passes(lowered(kept))))


def raise_until_passing(ladder: FormatLadder, current: Assignment, passes: Passes) -> Assignment:
    """Raise as few units as possible, by one format or if necessary to the widest, until the assignment passes."""
    ordered = ladder.most_in_need(current)
    for up in (lambda at: at + 1, lambda at: ladder.formats - 1):

        def raised(units: Sequence[int], up: Callable[[int], int] = up) -> Assignment:
            return tuple(up(at) if unit in set(units) else at for unit, at in enumerate(current))

        if raised(ordered) == ladder.widest or passes(raised(ordered)):
            return raised(minimal_subset(ordered, lambda units: passes(raised(units))))
    return ladder.widest


def minimal_subset(candidates: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a minimal subset of the candidates that passes. All of them together pass.

    >>> minimal_subset("abcdefgh", lambda kept: {"c", "f"} <= set(kept))
    ['c', 'f']
    """
    if not candidates or passes(()):
        return []
    # How many leading ones are needed: doubled until it passes, then bisected.
    fails, passing = 0, 1
    while passing < len(candidates) and not passes(candidates[:passing]):
        fails, passing = passing, 2 * passing
    passing = min(passing, len(candidates))
    while passing - fails > 1:
        middle = (fails + passing) // 2
        if passes(candidates[:middle]):
            passing = middle
        else:
            fails = middle
    last = candidates[passing - 1]
    return [*_needed([last], candidates[: passing - 1], passes), last]


def _needed(
    kept: Sequence[T], candidates: Sequence[T], passes: Callable[[Sequence[T]], bool], *, fails: bool = False
) -> list[T]:
    """Return the candidates needed in addition to ``kept``; ``fails``: ``kept`` alone is known to fail.

    Together with all candidates it is known to pass, and it does so, at each level, with those returned.
    """
    if not candidates or (not fails and passes(kept)):
        return []
    if len(candidates) == 1:
        return list(candidates)
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    of_second = _needed([*kept, *first], second, passes)
    of_first = _needed([*kept, *of_second], first, passes, fails=not of_second)
    return [*of_first, *of_second]

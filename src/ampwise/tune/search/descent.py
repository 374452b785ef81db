"""From all wide to as narrow as passes, in few trials.

An assignment has a place for each unit: 0 is the cheapest format, the last one the widest. With the widest everywhere
it passes, and nothing is taken to get worse by a wider format; where it does, what is found passes all the same.

Where it does not pass with the cheapest everywhere, one format after the other is tried, from wide to narrow: which
units have to stay behind for the rest to pass? They are asked for in the order of their sensitivity, for what raising
them costs: the first one, the first two, four, eight, until it passes, then by halves. Where the order was right, these
are the ones. Where it was wrong, those needed among them are found by halving again (QuickXplain): k of n in at most
2k·log2(n/k) + 2k trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = ["Assignment", "Ladder", "cheapest_passing", "least_kept", "raised_until"]

T = TypeVar("T")
Assignment = tuple[int, ...]
Passes = Callable[[Assignment], bool]

LEAST_COST = 1e-12  # of a wider format that costs nothing more


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The formats that units can have, and what is known about them beforehand."""

    formats: int  # how many
    lowest: Assignment  # the cheapest that each unit can have
    costs: tuple[tuple[float, ...], ...]  # of each unit in each format
    scores: tuple[tuple[float, ...], ...]  # of each unit in each format: how much it is thought to suffer

    @property
    def widest(self) -> Assignment:
        """Which passes."""
        return (self.formats - 1,) * len(self.lowest)

    def cost(self, assignment: Assignment) -> float:
        """Of all units."""
        return sum(costs[place] for costs, place in zip(self.costs, assignment, strict=True))

    def alone(self, unit: int, place: int) -> Assignment:
        """One unit at a place, and the others wide."""
        return tuple(place if other == unit else at for other, at in enumerate(self.widest))

    def with_score(self, unit: int, place: int, score: float) -> Ladder:
        """What was measured in place of what was thought."""
        own = (*self.scores[unit][:place], score, *self.scores[unit][place + 1 :])
        return replace(self, scores=(*self.scores[:unit], own, *self.scores[unit + 1 :]))

    def most_in_need(self, assignment: Assignment) -> list[int]:
        """Units that could have a wider format than here, those first that need it most for what it costs."""
        above = [unit for unit, at in enumerate(assignment) if at < self.formats - 1]
        return sorted(above, key=lambda unit: -self.need(unit, assignment[unit]))

    def ordered(self, units: Sequence[int], place: int) -> list[int]:
        """Those most in need of more than the format at this place first, for what the next one costs."""
        return sorted(units, key=lambda unit: -self.need(unit, place))

    def need(self, unit: int, place: int) -> float:
        """How much a unit is thought to suffer from a format, for what the next one costs."""
        more = self.costs[unit][place + 1] - self.costs[unit][place]
        return self.scores[unit][place] / max(more, LEAST_COST)


def cheapest_passing(ladder: Ladder, passes: Passes) -> Assignment:
    """An assignment that passes, and of which no unit can have the next narrower format.

    >>> ladder = Ladder(formats=2, lowest=(0,) * 4, costs=((1.0, 2.0),) * 4, scores=((1.0, 0.0),) * 4)
    >>> cheapest_passing(ladder, lambda assignment: assignment[2] == 1)
    (0, 0, 1, 0)
    """
    if passes(ladder.lowest):
        return ladder.lowest
    current = ladder.widest
    for place in reversed(range(ladder.formats - 1)):
        current = _level(ladder, current, place, passes)
    return current


def _level(ladder: Ladder, current: Assignment, place: int, passes: Passes) -> Assignment:
    """As many as can be from the format above this place to that at it."""
    movable = [unit for unit, at in enumerate(current) if at == place + 1 and ladder.lowest[unit] <= place]

    def lowered(kept: Sequence[int]) -> Assignment:
        down = set(movable) - set(kept)
        return tuple(at - (unit in down) for unit, at in enumerate(current))

    return lowered(least_kept(ladder.ordered(movable, place), lambda kept: passes(lowered(kept))))


def raised_until(ladder: Ladder, current: Assignment, passes: Passes) -> Assignment:
    """For one that does not pass after all: as few units as possible a format higher, or if need be the widest."""
    ordered = ladder.most_in_need(current)
    for up in (lambda at: at + 1, lambda at: ladder.formats - 1):

        def raised(units: Sequence[int], up: Callable[[int], int] = up) -> Assignment:
            return tuple(up(at) if unit in set(units) else at for unit, at in enumerate(current))

        if raised(ordered) == ladder.widest or passes(raised(ordered)):
            return raised(least_kept(ordered, lambda units: passes(raised(units))))
    return ladder.widest


def least_kept(candidates: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """The candidates without which it does not pass, none of which can be left out. With all of them it passes.

    >>> least_kept("abcdefgh", lambda kept: {"c", "f"} <= set(kept))
    ['c', 'f']
    """
    if not candidates or passes(()):
        return []
    count = _least_prefix(candidates, passes)
    last = candidates[count - 1]
    return [*_needed([last], candidates[: count - 1], passes), last]


def _least_prefix(candidates: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> int:
    """How many of the first are needed where none does not do and all do: doubled until it passes, then halved."""
    fails, does = 0, 1
    while does < len(candidates) and not passes(candidates[:does]):
        fails, does = does, 2 * does
    does = min(does, len(candidates))
    while does - fails > 1:
        middle = (fails + does) // 2
        if passes(candidates[:middle]):
            does = middle
        else:
            fails = middle
    return does


def _needed(
    kept: Sequence[T], candidates: Sequence[T], passes: Callable[[Sequence[T]], bool], *, fails: bool = False
) -> list[T]:
    """Of the candidates, those that are needed beside what is kept; ``fails``: that alone is known not to do.

    With all candidates it is known to do, and so it is, at each turn, with those that are returned.
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

"""What was found, on batches that the search has not seen; where it fails there, more is made wider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ampwise.tune.search.descent import Assignment, Ladder, raised_until
from ampwise.tune.search.found import Verified
from ampwise.tune.search.passes import Batch
from ampwise.tune.search.sensitivity import Look, scores_of
from ampwise.tune.search.trial import Trial
from ampwise.tune.search.trials import Spent, Trials
from ampwise.tune.search.units import Unit

__all__ = ["MOST_ALONE", "Checked", "verified_on"]

MOST_ALONE = 8  # modules that are measured by themselves

Looks = Callable[[Sequence[Batch]], Mapping[str, Look]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of it. ``looks`` and ``alone`` are of units that were raised, on the batches where they had to be."""

    verified: Verified | None
    best: Assignment
    looks: Mapping[str, Look] = field(default_factory=dict)
    alone: Mapping[int, tuple[int, Trial]] = field(default_factory=dict)
    spent: bool = False


def verified_on(
    held: Trials,
    trials: Trials,
    ladder: Ladder,
    best: Assignment,
    units: Sequence[Unit],
    tolerance: float,
    looks: Looks,
) -> Checked:
    """On the batches held back; where it fails there, more is raised until it passes there and on the others."""
    if not held.batches:
        return Checked(verified=None, best=best)
    first = held.whole(best)
    verified = Verified(batches=len(held.batches), error=first.error, worst=first.worst)
    if first.error <= tolerance or best == ladder.widest:
        return Checked(verified=verified, best=best)
    seen = looks(held.batches)
    alone = _alone(_by_looks(ladder, units, held, seen), best, held, tolerance)
    for unit, trial in alone.items():
        ladder = ladder.with_score(unit, best[unit], trial.error)
    raised, spent = _raised(ladder, best, held, trials, tolerance)
    changed = [unit for unit, (was, now) in enumerate(zip(best, raised, strict=True)) if was != now]
    names = [units[unit].name for unit in changed]
    return Checked(
        verified=replace(verified, raised=tuple(names), error_after=held.whole(raised).error),
        best=raised,
        looks={name: seen[name] for name in names if name in seen},
        alone={unit: (best[unit], alone[unit]) for unit in changed if unit in alone},
        spent=spent,
    )


def _by_looks(ladder: Ladder, units: Sequence[Unit], held: Trials, looks: Mapping[str, Look]) -> Ladder:
    """With what is thought of units now; what is in no look keeps what it had."""
    scores = [
        scores_of(looks[unit.name], held.choices) if unit.name in looks else before
        for unit, before in zip(units, ladder.scores, strict=True)
    ]
    return replace(ladder, scores=tuple(scores))


def _alone(ladder: Ladder, best: Assignment, held: Trials, tolerance: float) -> dict[int, Trial]:
    """What those do by themselves that are thought to be the cause: where an estimate was wrong, it was one of these.
    A half of the trials is left for raising them."""
    found: dict[int, Trial] = {}
    with suppress(Spent):
        for unit in ladder.most_in_need(best)[: int(min(MOST_ALONE, held.limit / 2))]:
            found[unit] = held.of(ladder.alone(unit, best[unit]), tolerance)
    return found


def _raised(
    ladder: Ladder, best: Assignment, held: Trials, trials: Trials, tolerance: float
) -> tuple[Assignment, bool]:
    def passes(assignment: Assignment) -> bool:
        if assignment == ladder.widest:
            return True
        return all(each.of(assignment, tolerance).error <= tolerance for each in (held, trials))

    try:
        return raised_until(ladder, best, passes), False
    except Spent:
        both = [each for each in held.passed(tolerance) if each in trials.passed(tolerance)]
        return min([ladder.widest, *both], key=ladder.cost), True

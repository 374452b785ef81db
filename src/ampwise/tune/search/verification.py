"""Verify the result on batches that the search has not seen; if it fails there, make more modules wider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ampwise.tune.search.descent import Assignment, FormatLadder, raise_until_passing
from ampwise.tune.search.passes import SearchBatch
from ampwise.tune.search.result import Verification
from ampwise.tune.search.sensitivity import UnitProbe, scores_of
from ampwise.tune.search.trial import SearchTrial
from ampwise.tune.search.trials import TrialRunner, TrialsSpent
from ampwise.tune.search.units import SearchUnit

__all__ = ["MOST_ALONE", "VerifiedSearch", "verify"]

MOST_ALONE = 8  # modules measured by themselves

Looks = Callable[[Sequence[SearchBatch]], Mapping[str, UnitProbe]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSearch:
    """Result of the verification. ``looks`` and ``alone`` cover raised units, on the batches that required it."""

    verified: Verification | None
    best: Assignment
    looks: Mapping[str, UnitProbe] = field(default_factory=dict)
    alone: Mapping[int, tuple[int, SearchTrial]] = field(default_factory=dict)
    spent: bool = False


def verify(
    held: TrialRunner,
    trials: TrialRunner,
    ladder: FormatLadder,
    best: Assignment,
    units: Sequence[SearchUnit],
    tolerance: float,
    looks: Looks,
) -> VerifiedSearch:
    """Verify on the batches held back; on failure raise units until it passes there and on the others."""
    if not held.batches:
        return VerifiedSearch(verified=None, best=best)
    first = held.whole(best)
    verified = Verification(batches=len(held.batches), error=first.error, worst=first.worst)
    if first.error <= tolerance or best == ladder.widest:
        return VerifiedSearch(verified=verified, best=best)
    seen = looks(held.batches)
    alone = _alone(_by_looks(ladder, units, held, seen), best, held, tolerance)
    for unit, trial in alone.items():
        ladder = ladder.with_score(unit, best[unit], trial.error)
    raised, spent = _raised(ladder, best, held, trials, tolerance)
    changed = [unit for unit, (was, now) in enumerate(zip(best, raised, strict=True)) if was != now]
    names = [units[unit].name for unit in changed]
    return VerifiedSearch(
        verified=replace(verified, raised=tuple(names), error_after=held.whole(raised).error),
        best=raised,
        looks={name: seen[name] for name in names if name in seen},
        alone={unit: (best[unit], alone[unit]) for unit in changed if unit in alone},
        spent=spent,
    )


def _by_looks(
    ladder: FormatLadder, units: Sequence[SearchUnit], held: TrialRunner, looks: Mapping[str, UnitProbe]
) -> FormatLadder:
    """Update the estimates of units; those without a look keep theirs."""
    scores = [
        scores_of(looks[unit.name], held.choices) if unit.name in looks else before
        for unit, before in zip(units, ladder.scores, strict=True)
    ]
    return replace(ladder, scores=tuple(scores))


def _alone(ladder: FormatLadder, best: Assignment, held: TrialRunner, tolerance: float) -> dict[int, SearchTrial]:
    """Measure the likely causes by themselves, as an estimate may be wrong. Half of the trials are left for raising."""
    found: dict[int, SearchTrial] = {}
    with suppress(TrialsSpent):
        for unit in ladder.most_in_need(best)[: int(min(MOST_ALONE, held.limit / 2))]:
            found[unit] = held.of(ladder.alone(unit, best[unit]), tolerance)
    return found


def _raised(
    ladder: FormatLadder, best: Assignment, held: TrialRunner, trials: TrialRunner, tolerance: float
) -> tuple[Assignment, bool]:
    def passes(assignment: Assignment) -> bool:
        if assignment == ladder.widest:
            return True
        return all(each.of(assignment, tolerance).error <= tolerance for each in (held, trials))

    try:
        return raise_until_passing(ladder, best, passes), False
    except TrialsSpent:
        both = [each for each in held.passed(tolerance) if each in trials.passed(tolerance)]
        return min([ladder.widest, *both], key=ladder.cost), True

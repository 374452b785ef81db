"""Build the result of a search from its trials: patterns, the ranking with reasons, the gain, the gap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Module

from ampwise.hardware import Gpu
from ampwise.train.precision.policy import Policy, named_modules
from ampwise.tune.search.arrangement import FormatArrangement
from ampwise.tune.search.costs import estimate_gain
from ampwise.tune.search.descent import FormatLadder
from ampwise.tune.search.format_choices import FormatChoice
from ampwise.tune.search.passes import PassRunner
from ampwise.tune.search.patterns import globs, spans
from ampwise.tune.search.reasons import SensitivityReason, find_reasons, usual_amplification
from ampwise.tune.search.result import ModuleSensitivity, SearchResult, Verification
from ampwise.tune.search.sensitivity import LocalError, UnitProbe
from ampwise.tune.search.trial import SearchTrial
from ampwise.tune.search.unit_facts import singular_range
from ampwise.tune.search.units import REST, SearchUnit

__all__ = ["SearchOutcomes", "build_result"]

MOST_CONDITIONS = 16  # modules whose singular values are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcomes:
    """Everything the result is built from."""

    passes: PassRunner
    units: Sequence[SearchUnit]
    left_wide: Sequence[SearchUnit]  # units that were not searched
    choices: Sequence[FormatChoice]
    tolerance: float
    noise: float
    best: SearchTrial
    arrangement: FormatArrangement
    looks: Mapping[str, UnitProbe]
    ladder: FormatLadder
    alone: Mapping[int, tuple[int, SearchTrial]]  # by unit, a format's index and the trial with it alone there
    verified: Verification | None
    kept_bytes: tuple[int, int]
    batches: int
    trials: int
    spent: bool  # the limit on trials was reached
    problem: str | None  # of a trial that did not run
    resumed: int
    seconds: float

    def alone_narrower(self, unit: int) -> SearchTrial | None:
        """Return the trial in which only this unit has the next narrower format, if it was made."""
        place, trial = self.alone.get(unit, (None, None))
        return trial if place == self.best.assignment[unit] - 1 else None

    @property
    def chosen(self) -> list[FormatChoice]:
        """The format of each searched unit."""
        return [self.choices[place] for place in self.best.assignment]


def build_result(subject: str, outcomes: SearchOutcomes, gpu: Gpu | None, left_out: str | None) -> SearchResult:
    """Build the result; ``left_out`` notes batches that were ignored."""
    best, wide = outcomes.best, outcomes.choices[-1]
    every = [*outcomes.units, *outcomes.left_wide]
    chosen = [*outcomes.chosen, *[wide] * len(outcomes.left_wide)]
    names = _Names(outcomes.passes.model)
    return SearchResult(
        subject=subject,
        formats=tuple(choice.name for choice in outcomes.choices),
        tolerance=outcomes.tolerance,
        noise=outcomes.noise,
        error=best.error,
        loss_error=best.loss,
        gradient_error=best.gradient,
        worst=best.worst,
        modules={unit.name: choice.name for unit, choice in zip(every, chosen, strict=True)},
        policy=_policy(outcomes.arrangement, names),
        narrow=_narrow(every, chosen, names),
        widened=tuple(names.globs(outcomes.arrangement.widened)),
        ranking=_ranking(outcomes),
        gain=estimate_gain(every, chosen, outcomes.choices, gpu, outcomes.kept_bytes),
        gap=_gap(outcomes),
        verified=outcomes.verified,
        batches=outcomes.batches,
        trials=outcomes.trials,
        spent=outcomes.spent,
        passes=outcomes.passes.count,
        seconds=outcomes.seconds,
        device=str(outcomes.passes.device),
        notes=(*([] if left_out is None else [left_out]), *_notes(outcomes)),
    )


class _Names:
    """Names of a model's modules, for patterns."""

    def __init__(self, model: Module) -> None:
        self._named = named_modules(model)

    def globs(self, modules: Iterable[Module]) -> list[str]:
        """Return patterns for these modules, and no others."""
        wanted = set(modules)
        first: dict[Module, str] = {}
        for name, module in self._named.items():
            if module in wanted:
                first.setdefault(module, name)
        return globs(list(first.values()), [name for name, module in self._named.items() if module not in wanted])


def _policy(arrangement: FormatArrangement, names: _Names) -> Policy:
    policy = Policy(arrangement.base)
    for region in dict.fromkeys(arrangement.regions.values()):
        matching = names.globs(module for module, its in arrangement.regions.items() if its == region)
        policy = policy.keep(region, *matching)
    return policy


def _narrow(units: Sequence[SearchUnit], chosen: Sequence[FormatChoice], names: _Names) -> dict[str, str]:
    found: dict[str, str] = {}
    for choice in dict.fromkeys(choice for choice in chosen if choice.narrow):
        modules = [unit.module for unit, its in zip(units, chosen, strict=True) if its == choice]
        found.update((pattern, choice.name) for pattern in names.globs(modules))
    return found


def _ranking(outcomes: SearchOutcomes) -> tuple[ModuleSensitivity, ...]:
    """Rank modules: widest formats first; equal ones by measured error, else by estimate."""

    def order(place: int) -> tuple[int, float]:
        at, alone = outcomes.best.assignment[place], outcomes.alone_narrower(place)
        return -at, -(outcomes.ladder.scores[place][max(at - 1, 0)] if alone is None else alone.error)

    raised = 0
    ranking = []
    for place in sorted(range(len(outcomes.units)), key=order):
        ranking.append(_sensitive(outcomes, place, with_condition=raised < MOST_CONDITIONS))
        raised += ranking[-1].narrower is not None
    return tuple(ranking)


def _sensitive(outcomes: SearchOutcomes, place: int, *, with_condition: bool) -> ModuleSensitivity:
    unit, at = outcomes.units[place], outcomes.best.assignment[place]
    narrower = outcomes.choices[at - 1] if at > outcomes.ladder.lowest[place] else None
    look, alone = outcomes.looks.get(unit.name), outcomes.alone_narrower(place)
    reasons: tuple[SensitivityReason, ...] = ()
    if narrower is not None:
        reasons = find_reasons(
            narrower,
            None if look is None else look.facts,
            None if look is None else look.locals.get(narrower.name),
            singular_range(unit) if with_condition else None,
            usual_amplification(_locals(outcomes.looks, narrower.name)),
            alone,
        )
    return ModuleSensitivity(
        name=unit.name,
        kind=unit.kind,
        format=outcomes.choices[at].name,
        share=unit.flops / sum(each.flops for each in (*outcomes.units, *outcomes.left_wide)),
        narrower=None if narrower is None else narrower.name,
        estimates={} if look is None else {name: local.score for name, local in look.locals.items()},
        alone=None if alone is None else alone.error,
        reasons=tuple(reason.text for reason in reasons),
    )


def _locals(looks: Mapping[str, UnitProbe], name: str) -> dict[str, LocalError]:
    return {unit: look.locals[name] for unit, look in looks.items() if name in look.locals}


def _gap(outcomes: SearchOutcomes) -> float:
    """Return how much cheaper another assignment could be: units that fail a format alone must be wider in any."""
    ladder, found = outcomes.ladder, outcomes.best.assignment
    least = list(ladder.lowest)
    for unit, (place, trial) in outcomes.alone.items():
        if trial.error > outcomes.tolerance:
            least[unit] = max(least[unit], place + 1)
    bound = ladder.cost(tuple(least))
    if tuple(least) == ladder.lowest and found != ladder.lowest:  # the lowest has failed: something has to be wider
        bound += min(
            costs[place + 1] - costs[place]
            for costs, place in zip(ladder.costs, ladder.lowest, strict=True)
            if place + 1 < ladder.formats
        )
    cost = ladder.cost(found)
    return max(0.0, (cost - bound) / cost)


def _notes(outcomes: SearchOutcomes) -> Iterable[str]:
    if outcomes.spent:
        yield "the search reached its limit of trials; with a higher trials= it may find a cheaper policy"
    if outcomes.problem is not None:
        yield f"some trials did not run, and count as failed: {outcomes.problem}"
    if outcomes.batches == 1:
        yield "there was only one batch, so nothing was held back for verification"
    whole = [unit.name for unit in outcomes.units if unit.name != REST and not unit.emulated]
    if any(unit.name == REST and not unit.emulated for unit in outcomes.units):
        yield "matmuls outside of any module are not emulated, and have at least 16 bits"
    if whole:
        yield f"recurrent layers are not emulated, and have at least 16 bits: {', '.join(spans(whole))}"
    if outcomes.left_wide:
        yield f"{len(outcomes.left_wide)} modules were not searched, and stay in FP32"
    if outcomes.resumed:
        yield f"{outcomes.resumed} trials came from an earlier run"

"""From what was tried to what is told: patterns, the ranking with reasons, the gain, the gap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.nn import Module

from ampwise.engine.precision.policy import Policy, named_modules
from ampwise.hardware import Gpu
from ampwise.tune.search.arrangement import Arrangement
from ampwise.tune.search.choices import Choice
from ampwise.tune.search.costs import gain_of
from ampwise.tune.search.descent import Ladder
from ampwise.tune.search.facts import condition_of
from ampwise.tune.search.found import Found, Sensitive, Verified
from ampwise.tune.search.passes import Passes
from ampwise.tune.search.patterns import globs, spans
from ampwise.tune.search.reasons import Reason, reasons_of, usual_amplification
from ampwise.tune.search.sensitivity import Local, Look
from ampwise.tune.search.trial import Trial
from ampwise.tune.search.units import REST, Unit

__all__ = ["Outcomes", "result_of"]

MOST_CONDITIONS = 16  # modules whose singular values are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """All that a search has to tell from."""

    passes: Passes
    units: Sequence[Unit]
    left_wide: Sequence[Unit]  # that were not searched
    choices: Sequence[Choice]
    tolerance: float
    noise: float
    best: Trial
    arrangement: Arrangement
    looks: Mapping[str, Look]
    ladder: Ladder
    alone: Mapping[int, tuple[int, Trial]]  # by unit, a place and the trial with it alone there
    verified: Verified | None
    kept_bytes: tuple[int, int]
    batches: int
    trials: int
    spent: bool  # no more trials were allowed
    problem: str | None  # of a trial that did not run
    resumed: int
    seconds: float

    def alone_narrower(self, unit: int) -> Trial | None:
        """Where it alone has the next narrower format than was found for it, if that was tried."""
        place, trial = self.alone.get(unit, (None, None))
        return trial if place == self.best.assignment[unit] - 1 else None

    @property
    def chosen(self) -> list[Choice]:
        """The format of each unit that was searched."""
        return [self.choices[place] for place in self.best.assignment]


def result_of(subject: str, outcomes: Outcomes, gpu: Gpu | None, left_out: str | None) -> Found:
    """The record of it; ``left_out``: of what was given."""
    best, wide = outcomes.best, outcomes.choices[-1]
    every = [*outcomes.units, *outcomes.left_wide]
    chosen = [*outcomes.chosen, *[wide] * len(outcomes.left_wide)]
    names = _Names(outcomes.passes.model)
    return Found(
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
        gain=gain_of(every, chosen, outcomes.choices, gpu, outcomes.kept_bytes),
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
    """Of the modules of a model, as patterns know them."""

    def __init__(self, model: Module) -> None:
        self._named = named_modules(model)

    def globs(self, modules: Iterable[Module]) -> list[str]:
        """Patterns for these modules, and no others."""
        wanted = set(modules)
        first: dict[Module, str] = {}
        for name, module in self._named.items():
            if module in wanted:
                first.setdefault(module, name)
        return globs(list(first.values()), [name for name, module in self._named.items() if module not in wanted])


def _policy(arrangement: Arrangement, names: _Names) -> Policy:
    policy = Policy(arrangement.base)
    for region in dict.fromkeys(arrangement.regions.values()):
        matching = names.globs(module for module, its in arrangement.regions.items() if its == region)
        policy = policy.keep(region, *matching)
    return policy


def _narrow(units: Sequence[Unit], chosen: Sequence[Choice], names: _Names) -> dict[str, str]:
    found: dict[str, str] = {}
    for choice in dict.fromkeys(choice for choice in chosen if choice.narrow):
        modules = [unit.module for unit, its in zip(units, chosen, strict=True) if its == choice]
        found.update((pattern, choice.name) for pattern in names.globs(modules))
    return found


def _ranking(outcomes: Outcomes) -> tuple[Sensitive, ...]:
    """Those with the widest formats first; of equals, those that suffer more, by measurement or else by estimate."""

    def order(place: int) -> tuple[int, float]:
        at, alone = outcomes.best.assignment[place], outcomes.alone_narrower(place)
        return -at, -(outcomes.ladder.scores[place][max(at - 1, 0)] if alone is None else alone.error)

    raised = 0
    ranking = []
    for place in sorted(range(len(outcomes.units)), key=order):
        ranking.append(_sensitive(outcomes, place, with_condition=raised < MOST_CONDITIONS))
        raised += ranking[-1].narrower is not None
    return tuple(ranking)


def _sensitive(outcomes: Outcomes, place: int, *, with_condition: bool) -> Sensitive:
    unit, at = outcomes.units[place], outcomes.best.assignment[place]
    narrower = outcomes.choices[at - 1] if at > outcomes.ladder.lowest[place] else None
    look, alone = outcomes.looks.get(unit.name), outcomes.alone_narrower(place)
    reasons: tuple[Reason, ...] = ()
    if narrower is not None:
        reasons = reasons_of(
            narrower,
            None if look is None else look.facts,
            None if look is None else look.locals.get(narrower.name),
            condition_of(unit) if with_condition else None,
            usual_amplification(_locals(outcomes.looks, narrower.name)),
            alone,
        )
    return Sensitive(
        name=unit.name,
        kind=unit.kind,
        format=outcomes.choices[at].name,
        share=unit.flops / sum(each.flops for each in (*outcomes.units, *outcomes.left_wide)),
        narrower=None if narrower is None else narrower.name,
        estimates={} if look is None else {name: local.score for name, local in look.locals.items()},
        alone=None if alone is None else alone.error,
        reasons=tuple(reason.text for reason in reasons),
    )


def _locals(looks: Mapping[str, Look], name: str) -> dict[str, Local]:
    return {unit: look.locals[name] for unit, look in looks.items() if name in look.locals}


def _gap(outcomes: Outcomes) -> float:
    """How much cheaper than what was found another could be: units that were shown not to stand a format by
    themselves have a wider one in whatever passes."""
    ladder, found = outcomes.ladder, outcomes.best.assignment
    least = list(ladder.lowest)
    for unit, (place, trial) in outcomes.alone.items():
        if trial.error > outcomes.tolerance:
            least[unit] = max(least[unit], place + 1)
    bound = ladder.cost(tuple(least))
    if tuple(least) == ladder.lowest and found != ladder.lowest:  # which has failed: something is to be wider
        bound += min(
            costs[place + 1] - costs[place]
            for costs, place in zip(ladder.costs, ladder.lowest, strict=True)
            if place + 1 < ladder.formats
        )
    cost = ladder.cost(found)
    return max(0.0, (cost - bound) / cost)


def _notes(outcomes: Outcomes) -> Iterable[str]:
    if outcomes.spent:
        yield "the search ended because there were as many trials as allowed; more may find a cheaper policy: trials="
    if outcomes.problem is not None:
        yield f"some trials did not run, and count as not passed: {outcomes.problem}"
    if outcomes.batches == 1:
        yield "there was one batch: nothing was held back to verify it on"
    whole = [unit.name for unit in outcomes.units if unit.name != REST and not unit.emulated]
    if any(unit.name == REST and not unit.emulated for unit in outcomes.units):
        yield "products outside of any module are not emulated, and have 16 bits at least"
    if whole:
        yield f"recurrent layers are not emulated, and have 16 bits at least: {', '.join(spans(whole))}"
    if outcomes.left_wide:
        yield f"{len(outcomes.left_wide)} modules were not searched, and stay in FP32"
    if outcomes.resumed:
        yield f"{outcomes.resumed} trials were there from an earlier run"

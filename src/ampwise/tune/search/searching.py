"""``search``: from a function and batches to the cheapest formats that pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch.nn import Module

from ampwise.engine.arguments import where
from ampwise.tune.search.baseline import noise_of, reference_of
from ampwise.tune.search.checking import (
    checked_batches,
    checked_gpu,
    checked_limit,
    checked_model,
    checked_tolerance,
)
from ampwise.tune.search.choices import DEFAULT_FORMATS, Choice, choices_of
from ampwise.tune.search.costs import costs_of
from ampwise.tune.search.descent import Assignment, Ladder, cheapest_passing, raised_until
from ampwise.tune.search.difference import Groups, Reference
from ampwise.tune.search.facts import facts_of
from ampwise.tune.search.fingerprint import fingerprint_of
from ampwise.tune.search.found import Found, Verified
from ampwise.tune.search.passes import Batch, Passes
from ampwise.tune.search.result import Outcomes, result_of
from ampwise.tune.search.sensitivity import Look, Looking
from ampwise.tune.search.store import Store
from ampwise.tune.search.telling import Pace, Progress
from ampwise.tune.search.trial import Trial
from ampwise.tune.search.trials import Spent, Trials
from ampwise.tune.search.units import REST, Unit, selected, units_of

__all__ = ["search"]

MOST_ALONE = 8  # modules that are measured by themselves at the end


def search(
    fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    tolerance: float = 0.01,
    formats: Sequence[str] = DEFAULT_FORMATS,
    model: Module | None = None,
    modules: Sequence[str] = (),
    gpu: str | None = None,
    trials: int | None = None,
    resume: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    name: str | None = None,
) -> Found:
    """Find the cheapest format for each module with which loss and gradients stay within a tolerance of FP32's.

    ``fn(*batch)`` returns the loss; ``batches`` are a few that stand for the rest, of which a quarter is held back to
    verify what was found. Formats of 8 bits and fewer are emulated, so that no hardware is needed that has them.

    >>> import torch, ampwise
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    >>> def loss_fn(x, y):
    ...     return (model(x) - y).square().mean()
    >>> batches = [(torch.randn(64, 16), torch.randn(64, 1)) for _ in range(4)]
    >>> found = ampwise.search(loss_fn, batches, tolerance=0.02)
    >>> found.modules
    {'0': 'e4m3', '2': 'e4m3'}
    >>> with found.apply(model) as on:
    ...     with on.forward():
    ...         loss = loss_fn(*batches[0])
    ...     loss.backward()

    tolerance: of the loss, relatively; and of the progress that a step makes in each module: half of the squared
        relative error of its gradient. FP32 is compared with itself first, and a tolerance below that is refused.
    formats: names, of which "fp32" is one: what must stay wide has it.
    model: where it is neither ``fn`` nor the one module that ``fn`` calls.
    modules: patterns of those to search; the others stay in FP32.
    gpu: whose datasheet the predicted time rests on; by default the GPU that is here.
    trials: how many assignments may be tried.
    resume: a file that keeps the trials, and from which an interrupted search goes on. It is removed at the end.
    progress: called with where the search is.

    Weights, buffers, gradients and random numbers are left as they were.
    """
    asked, choices = checked_tolerance(tolerance), choices_of(formats)
    given = checked_batches(fn, batches)
    found_model = checked_model(fn, model, given[0])
    searched = _Search(fn, found_model, given, choices, asked, modules, progress)
    gpu_meant = checked_gpu(gpu, searched.passes.device)
    limit = checked_limit(trials, len(searched.units))
    outcomes = searched.run(limit, None if resume is None else Path(resume))
    return result_of(name or type(found_model).__name__, outcomes, gpu_meant)


class _Search:
    """The way from all wide to what passes."""

    def __init__(
        self,
        fn: Callable[..., Any],
        model: Module,
        batches: Sequence[Batch],
        choices: Sequence[Choice],
        tolerance: float,
        modules: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self.began = time.monotonic()
        self.choices, self.tolerance = tuple(choices), tolerance
        self.passes = Passes(fn, model, where([model]))
        self.pace = Pace(progress, lambda: self.passes.count)
        held_back = max(1, len(batches) // 4) if len(batches) > 1 else 0
        self.batches, self.held_back = batches[: len(batches) - held_back], batches[len(batches) - held_back :]
        every = units_of(model, lambda: self.passes.forward(batches[0]))
        self.units = selected(every, modules)
        self.left_wide = [unit for unit in every if unit not in self.units]
        self.stages: list[Trials] = []
        self.problem: str | None = None  # of a trial that did not run
        self.groups = Groups(model, self.passes.parameters)
        trials = 4 + 2 * math.ceil(math.log2(len(self.units) + 1))
        self.pace.expected = len(self.batches) * (2 + trials) + 2 + 3 * len(self.held_back)

    def run(self, limit: int, path: Path | None) -> Outcomes:
        """All of it."""
        every = [*self.units, *self.left_wide]
        batches = [*self.batches, *self.held_back]
        model, device = self.passes.model, self.passes.device
        store = Store(path, fingerprint_of(model, every, batches, self.choices, self.tolerance, device))
        try:
            outcomes = self._searched(limit, store)
        except BaseException:
            store.write()
            raise
        store.remove()
        return outcomes

    def _searched(self, limit: int, store: Store) -> Outcomes:
        reference = self._reference(self.batches)
        self.pace.tell("FP32 again, for the noise")
        noise = noise_of(self.passes, reference, self.batches, self.tolerance)
        trials = self._trials("search", reference, self.batches, store)
        looks = self._looks()
        ladder = self._ladder(looks, trials)
        best, spent = self._descend(ladder, trials, limit)
        alone = self._alone_narrower(ladder, best, trials)
        verified, best = self._verified(ladder, best, trials, store)
        kept = [self.passes.kept_bytes(self.batches[0], trials.arranged(each)) for each in (best, ladder.widest)]
        return Outcomes(
            passes=self.passes,
            units=self.units,
            left_wide=self.left_wide,
            choices=self.choices,
            tolerance=self.tolerance,
            noise=noise,
            best=trials.whole(best),
            arrangement=trials.arranged(best),
            looks=looks,
            ladder=ladder,
            alone=alone,
            verified=verified,
            kept_bytes=(kept[0], kept[1]),
            batches=len(self.batches) + len(self.held_back),
            trials=sum(each.count for each in self.stages),
            spent=spent,
            problem=self.problem,
            resumed=store.resumed,
            seconds=time.monotonic() - self.began,
        )

    def _reference(self, batches: Sequence[Batch]) -> Reference:
        self.pace.tell("FP32, to compare with")
        return reference_of(self.passes, self.groups, batches)

    def _looks(self) -> dict[str, Look]:
        self.pace.tell("each module by itself")
        every = [*self.units, *self.left_wide]
        looking = Looking(every, self.choices, self.passes.device, facts_of, only={unit.name for unit in self.units})
        self.passes.watched(self.batches[0], looking)
        return looking.looks

    def _trials(self, stage: str, reference: Reference, batches: Sequence[Batch], store: Store) -> Trials:
        every = [*self.units, *self.left_wide]
        self.stages.append(Trials(stage, self.passes, every, self.choices, reference, batches, store, self._told))
        return self.stages[-1]

    def _told(self, trial: Trial) -> None:
        counts = [f"{trial.assignment.count(place)} in {choice.name}" for place, choice in enumerate(self.choices)]
        shown = ", ".join(text for text in counts if not text.startswith("0 "))
        if trial.problem is not None:
            self.problem = self.problem or trial.problem
            self.pace.tell(f"{shown}: does not run: {trial.problem}")
            return
        more = "" if trial.whole else "at least "
        verdict = "passes" if trial.error <= self.tolerance else "does not pass"
        self.pace.tell(f"{shown}: error {more}{trial.error:.2g}, {verdict}")

    def _ladder(self, looks: dict[str, Look], trials: Trials) -> Ladder:
        lowest = tuple(0 if unit.emulated else self._first_wide for unit in self.units)
        scores = [self._scores(unit, looks.get(unit.name)) for unit in self.units]
        rest = next((place for place, unit in enumerate(self.units) if unit.name == REST), None)
        if rest is not None and trials.of(lowest, self.tolerance).error > self.tolerance:
            # It cannot be run by itself; what it does to the whole is measured.
            for place in range(lowest[rest], len(self.choices) - 1):
                scores[rest][place] = trials.of(self._alone(rest, place), self.tolerance).error
        return Ladder(
            formats=len(self.choices),
            lowest=lowest,
            costs=costs_of(self.units, self.choices),
            scores=tuple(map(tuple, scores)),
        )

    @property
    def _first_wide(self) -> int:
        return next(place for place, choice in enumerate(self.choices) if not choice.narrow)

    def _scores(self, unit: Unit, look: Look | None) -> list[float]:
        found = {} if look is None else look.locals
        return [found[choice.name].score if choice.name in found else 0.0 for choice in self.choices]

    def _alone(self, unit: int, place: int) -> Assignment:
        widest = len(self.choices) - 1
        return tuple(place if other == unit else widest for other in range(len(self.units)))

    def _descend(self, ladder: Ladder, trials: Trials, limit: int) -> tuple[Assignment, bool]:
        """The cheapest that was found to pass, and whether it ended because there were enough trials."""
        best = ladder.widest

        def passes(assignment: Assignment) -> bool:
            nonlocal best
            if assignment == ladder.widest:
                return True
            if trials.count >= limit and not trials.knows(assignment):
                raise Spent
            if trials.of(assignment, self.tolerance).error > self.tolerance:
                return False
            best = min(best, assignment, key=ladder.cost)
            return True

        try:
            return cheapest_passing(ladder, passes), False
        except Spent:
            return best, True

    def _alone_narrower(self, ladder: Ladder, best: Assignment, trials: Trials) -> dict[int, tuple[int, float]]:
        """For units above their cheapest format, the error where one of them alone has the next narrower one: beyond
        the tolerance, no assignment passes in which it has that."""
        raised = [unit for unit, place in enumerate(best) if place > ladder.lowest[unit]]
        worst = sorted(raised, key=lambda unit: -ladder.scores[unit][best[unit] - 1])[:MOST_ALONE]
        places = {unit: best[unit] - 1 for unit in worst}
        return {
            unit: (place, trials.of(self._alone(unit, place), self.tolerance).error) for unit, place in places.items()
        }

    def _verified(
        self, ladder: Ladder, best: Assignment, trials: Trials, store: Store
    ) -> tuple[Verified | None, Assignment]:
        """On the batches held back; where it fails there, more is raised until it passes there and on the others."""
        if not self.held_back:
            return None, best
        held = self._trials("verify", self._reference(self.held_back), self.held_back, store)
        error = held.whole(best).error
        if error <= self.tolerance or best == ladder.widest:
            return Verified(batches=len(self.held_back), error=error), best

        def passes(assignment: Assignment) -> bool:
            if assignment == ladder.widest:
                return True
            return all(each.of(assignment, self.tolerance).error <= self.tolerance for each in (held, trials))

        raised = raised_until(ladder, best, passes)
        names = tuple(unit.name for unit, was, now in zip(self.units, best, raised, strict=True) if was != now)
        after = held.whole(raised).error
        return Verified(batches=len(self.held_back), error=error, raised=names, error_after=after), raised

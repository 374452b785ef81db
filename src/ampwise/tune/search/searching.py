"""``search``: from a function and batches to the cheapest formats that pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch.nn import Module

from ampwise.engine.arguments import where
from ampwise.tune.search.baseline import noise_of, reference_of
from ampwise.tune.search.checking import (
    checked_batches,
    checked_file,
    checked_gpu,
    checked_limit,
    checked_model,
    checked_tolerance,
)
from ampwise.tune.search.choices import DEFAULT_FORMATS, Choice, choices_of
from ampwise.tune.search.costs import costs_of
from ampwise.tune.search.descent import Assignment, Ladder, cheapest_passing
from ampwise.tune.search.difference import Groups
from ampwise.tune.search.facts import facts_of
from ampwise.tune.search.fingerprint import fingerprint_of
from ampwise.tune.search.found import Found
from ampwise.tune.search.passes import Batch, Passes
from ampwise.tune.search.result import Outcomes, result_of
from ampwise.tune.search.sensitivity import Look, Looking, scores_of
from ampwise.tune.search.store import Store
from ampwise.tune.search.telling import Pace, Progress
from ampwise.tune.search.trial import Trial
from ampwise.tune.search.trials import Spent, Trials
from ampwise.tune.search.units import REST, selected, units_of
from ampwise.tune.search.verifying import MOST_ALONE, verified_on

__all__ = ["search"]


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
    trials: how many assignments may be tried, and how many more where it fails on the batches held back.
    resume: a file that keeps the trials, and from which an interrupted search goes on. It is removed at the end.
    progress: called with where the search is.

    Weights, buffers, gradients and random numbers are left as they were.
    """
    asked, choices, file = checked_tolerance(tolerance), choices_of(formats), checked_file(resume)
    given, left_out = checked_batches(fn, batches)
    found_model = checked_model(fn, model, given[0])
    searched = _Search(fn, found_model, given, choices, asked, modules, progress)
    gpu_meant = checked_gpu(gpu, searched.passes.device)
    limit = checked_limit(trials, len(searched.units))
    outcomes = searched.run(limit, file)
    return result_of(name or type(found_model).__name__, outcomes, gpu_meant, left_out)


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
        self.every = [*self.units, *(unit for unit in every if unit not in self.units)]
        self.problem: str | None = None  # of a trial that did not run
        self.groups = Groups(model, self.passes.parameters)
        trials = 4 + 2 * math.ceil(math.log2(len(self.units) + 1))
        self.pace.expected = len(self.batches) * (2 + trials) + 2 + 3 * len(self.held_back)

    def run(self, limit: int, path: Path | None) -> Outcomes:
        """All of it. What is told of the function in FP32 is told before anything is tried."""
        self.pace.tell("FP32, to compare with")
        reference = reference_of(self.passes, self.groups, self.batches)
        unseen = reference_of(self.passes, self.groups, self.held_back)
        self.pace.tell("FP32 again, for the noise")
        noise = noise_of(self.passes, reference, self.batches, self.tolerance)
        store = Store(path, self._fingerprint([*reference.losses, *unseen.losses]))
        trials = Trials("search", self.passes, self.every, self.choices, reference, self.batches, store, self._told)
        held = Trials("verify", self.passes, self.every, self.choices, unseen, self.held_back, store, self._told_unseen)
        trials.limit = held.limit = limit
        try:
            outcomes = self._searched(trials, held, noise, store.resumed)
        except BaseException:
            store.write()
            raise
        store.remove()
        return outcomes

    def _fingerprint(self, losses: Sequence[float]) -> dict[str, Any]:
        batches, model, device = [*self.batches, *self.held_back], self.passes.model, self.passes.device
        return fingerprint_of(model, self.every, batches, self.choices, self.tolerance, losses, device)

    def _searched(self, trials: Trials, held: Trials, noise: float, resumed: int) -> Outcomes:
        looks = self._looks(self.batches[:1])
        ladder = self._ladder(looks, trials)
        best, spent = self._descend(ladder, trials)
        alone = self._alone_narrower(ladder, best, trials)
        trials.limit = math.inf
        checked = verified_on(held, trials, ladder, best, self.units, self.tolerance, self._looks)
        best, tried = checked.best, trials.count + held.count
        kept = [self.passes.kept_bytes(self.batches[0], trials.arranged(each)) for each in (best, ladder.widest)]
        return Outcomes(
            passes=self.passes,
            units=self.units,
            left_wide=self.every[len(self.units) :],
            choices=self.choices,
            tolerance=self.tolerance,
            noise=noise,
            best=trials.whole(best),
            arrangement=trials.arranged(best),
            looks={**looks, **checked.looks},
            ladder=ladder,
            alone={**alone, **checked.alone},
            verified=checked.verified,
            kept_bytes=(kept[0], kept[1]),
            batches=len(self.batches) + len(self.held_back),
            trials=tried,
            spent=spent or checked.spent,
            problem=self.problem,
            resumed=resumed,
            seconds=time.monotonic() - self.began,
        )

    def _looks(self, batches: Sequence[Batch]) -> dict[str, Look]:
        self.pace.tell("each module by itself")
        only = {unit.name for unit in self.units}
        looking = Looking(self.every, self.choices, self.passes.device, facts_of, only=only)
        for batch in batches:
            self.passes.watched(batch, looking)
        return looking.looks

    def _told_unseen(self, trial: Trial) -> None:
        self._told(trial, "held back: ")

    def _told(self, trial: Trial, on: str = "") -> None:
        counts = [f"{trial.assignment.count(place)} in {choice.name}" for place, choice in enumerate(self.choices)]
        shown = on + ", ".join(text for text in counts if not text.startswith("0 "))
        if trial.problem is not None:
            self.problem = self.problem or trial.problem
            self.pace.tell(f"{shown}: does not run: {trial.problem}")
            return
        more = "" if trial.whole else "at least "
        verdict = "passes" if trial.error <= self.tolerance else "does not pass"
        self.pace.tell(f"{shown}: error {more}{trial.error:.2g}, {verdict}")

    def _ladder(self, looks: Mapping[str, Look], trials: Trials) -> Ladder:
        first_wide = next(place for place, choice in enumerate(self.choices) if not choice.narrow)
        ladder = Ladder(
            formats=len(self.choices),
            lowest=tuple(0 if unit.emulated else first_wide for unit in self.units),
            costs=costs_of(self.units, self.choices),
            scores=tuple(scores_of(looks.get(unit.name), self.choices) for unit in self.units),
        )
        rest = next((place for place, unit in enumerate(self.units) if unit.name == REST), None)
        with suppress(Spent):
            if rest is not None and trials.of(ladder.lowest, self.tolerance).error > self.tolerance:
                # It cannot be run by itself; what it does to the whole is measured.
                for place in range(ladder.lowest[rest], len(self.choices) - 1):
                    error = trials.of(ladder.alone(rest, place), self.tolerance).error
                    ladder = ladder.with_score(rest, place, error)
        return ladder

    def _descend(self, ladder: Ladder, trials: Trials) -> tuple[Assignment, bool]:
        """The cheapest that was found to pass, and whether it ended because there were enough trials."""

        def passes(assignment: Assignment) -> bool:
            return assignment == ladder.widest or trials.of(assignment, self.tolerance).error <= self.tolerance

        try:
            return cheapest_passing(ladder, passes), False
        except Spent:
            return min([ladder.widest, *trials.passed(self.tolerance)], key=ladder.cost), True

    def _alone_narrower(self, ladder: Ladder, best: Assignment, trials: Trials) -> dict[int, tuple[int, Trial]]:
        """For units above their cheapest format, the trial where one of them alone has the next narrower one: beyond
        the tolerance, no assignment passes in which it has that."""
        raised = [unit for unit, place in enumerate(best) if place > ladder.lowest[unit]]
        worst = sorted(raised, key=lambda unit: -ladder.scores[unit][best[unit] - 1])[:MOST_ALONE]
        found: dict[int, tuple[int, Trial]] = {}
        with suppress(Spent):
            for unit in worst:
                place = best[unit] - 1
                found[unit] = place, trials.of(ladder.alone(unit, place), self.tolerance)
        return found

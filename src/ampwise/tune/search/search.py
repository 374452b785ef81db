"""``ampwise.search``: find the cheapest formats that pass, from a function and batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch.nn import Module

from ampwise.train.arguments import model_device
from ampwise.tune.search.arguments import (
    checked_batches,
    checked_file,
    checked_gpu,
    checked_limit,
    checked_model,
    checked_tolerance,
)
from ampwise.tune.search.baseline import measure_noise, run_reference
from ampwise.tune.search.build_result import SearchOutcomes, build_result
from ampwise.tune.search.costs import unit_costs
from ampwise.tune.search.descent import Assignment, FormatLadder, cheapest_passing
from ampwise.tune.search.fingerprint import fingerprint_of
from ampwise.tune.search.format_choices import DEFAULT_FORMATS, FormatChoice, parse_formats
from ampwise.tune.search.fp32_error import ParameterGroups
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.progress import Progress, ProgressCounter
from ampwise.tune.search.result import SearchResult
from ampwise.tune.search.sensitivity import SensitivityProbe, UnitProbe, scores_of
from ampwise.tune.search.trial import SearchTrial
from ampwise.tune.search.trial_store import TrialStore
from ampwise.tune.search.trials import TrialRunner, TrialsSpent
from ampwise.tune.search.unit_facts import measure_facts
from ampwise.tune.search.units import REST, find_units, select_units
from ampwise.tune.search.verification import MOST_ALONE, verify

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
) -> SearchResult:
    """Find the cheapest format for each module with which loss and gradients stay within a tolerance of FP32's.

    ``fn(*batch)`` returns the loss; ``batches`` are a few representative ones, of which a quarter is held back for
    verification. Formats of 8 bits and fewer are emulated, so no hardware support is needed.

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

    tolerance: of the loss, relative; and of the progress that a step makes in each module: half of the squared relative
        error of its gradient. Two FP32 runs are compared first, and a tolerance below their difference is refused.
    formats: names, including "fp32", for what must stay wide.
    model: needed if it is neither ``fn`` nor the one module that ``fn`` calls.
    modules: patterns of modules to search; the others stay in FP32.
    gpu: the GPU whose datasheet the predicted time is based on; by default the one in this machine.
    trials: how many assignments may be tried; if verification fails, as many again.
    resume: a file that keeps the trials, from which an interrupted search continues. It is removed at the end.
    progress: called with the state of the search.

    Weights, buffers, gradients and random number generators are restored.
    """
    checked, choices, file = checked_tolerance(tolerance), parse_formats(formats), checked_file(resume)
    given, left_out = checked_batches(fn, batches)
    found_model = checked_model(fn, model, given[0])
    searched = _Search(fn, found_model, given, choices, checked, modules, progress)
    target = checked_gpu(gpu, searched.passes.device)
    limit = checked_limit(trials, len(searched.units))
    outcomes = searched.run(limit, file)
    return build_result(name or type(found_model).__name__, outcomes, target, left_out)


class _Search:
    """One search, from all wide to what passes."""

    def __init__(
        self,
        fn: Callable[..., Any],
        model: Module,
        batches: Sequence[SearchBatch],
        choices: Sequence[FormatChoice],
        tolerance: float,
        modules: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self.began = time.monotonic()
        self.choices, self.tolerance = tuple(choices), tolerance
        self.passes = PassRunner(fn, model, model_device([model]))
        self.pace = ProgressCounter(progress, lambda: self.passes.count)
        held_back = max(1, len(batches) // 4) if len(batches) > 1 else 0
        self.batches, self.held_back = batches[: len(batches) - held_back], batches[len(batches) - held_back :]
        every = find_units(model, lambda: self.passes.forward(batches[0]))
        self.units = select_units(every, modules)
        self.every = [*self.units, *(unit for unit in every if unit not in self.units)]
        self.problem: str | None = None  # of a trial that did not run
        self.groups = ParameterGroups(model, self.passes.parameters)
        trials = 4 + 2 * math.ceil(math.log2(len(self.units) + 1))
        self.pace.expected = len(self.batches) * (2 + trials) + 2 + 3 * len(self.held_back)

    def run(self, limit: int, path: Path | None) -> SearchOutcomes:
        """Run the search. Problems of the function in FP32 are raised before anything is tried."""
        self.pace.tell("FP32 reference")
        reference = run_reference(self.passes, self.groups, self.batches)
        unseen = run_reference(self.passes, self.groups, self.held_back)
        self.pace.tell("FP32 again, to measure noise")
        noise = measure_noise(self.passes, reference, self.batches, self.tolerance)
        store = TrialStore(path, self._fingerprint([*reference.losses, *unseen.losses]))
        trials = TrialRunner(
            "search", self.passes, self.every, self.choices, reference, self.batches, store, self._report
        )
        held = TrialRunner(
            "verify", self.passes, self.every, self.choices, unseen, self.held_back, store, self._report_held
        )
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

    def _searched(self, trials: TrialRunner, held: TrialRunner, noise: float, resumed: int) -> SearchOutcomes:
        looks = self._looks(self.batches[:1])
        ladder = self._ladder(looks, trials)
        best, spent = self._descend(ladder, trials)
        alone = self._alone_narrower(ladder, best, trials)
        trials.limit = math.inf
        checked = verify(held, trials, ladder, best, self.units, self.tolerance, self._looks)
        best, tried = checked.best, trials.count + held.count
        kept = [self.passes.kept_bytes(self.batches[0], trials.arranged(each)) for each in (best, ladder.widest)]
        return SearchOutcomes(
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

    def _looks(self, batches: Sequence[SearchBatch]) -> dict[str, UnitProbe]:
        self.pace.tell("probing each module")
        only = {unit.name for unit in self.units}
        looking = SensitivityProbe(self.every, self.choices, self.passes.device, measure_facts, only=only)
        for batch in batches:
            self.passes.watched(batch, looking)
        return looking.looks

    def _report_held(self, trial: SearchTrial) -> None:
        self._report(trial, "held back: ")

    def _report(self, trial: SearchTrial, on: str = "") -> None:
        counts = [f"{trial.assignment.count(place)} in {choice.name}" for place, choice in enumerate(self.choices)]
        shown = on + ", ".join(text for text in counts if not text.startswith("0 "))
        if trial.problem is not None:
            self.problem = self.problem or trial.problem
            self.pace.tell(f"{shown}: does not run: {trial.problem}")
            return
        more = "" if trial.whole else "at least "
        verdict = "passes" if trial.error <= self.tolerance else "does not pass"
        self.pace.tell(f"{shown}: error {more}{trial.error:.2g}, {verdict}")

    def _ladder(self, looks: Mapping[str, UnitProbe], trials: TrialRunner) -> FormatLadder:
        first_wide = next(place for place, choice in enumerate(self.choices) if not choice.narrow)
        ladder = FormatLadder(
            formats=len(self.choices),
            lowest=tuple(0 if unit.emulated else first_wide for unit in self.units),
            costs=unit_costs(self.units, self.choices),
            scores=tuple(scores_of(looks.get(unit.name), self.choices) for unit in self.units),
        )
        rest = next((place for place, unit in enumerate(self.units) if unit.name == REST), None)
        with suppress(TrialsSpent):
            if rest is not None and trials.of(ladder.lowest, self.tolerance).error > self.tolerance:
                # It cannot be run by itself: measure its effect on the whole.
                for place in range(ladder.lowest[rest], len(self.choices) - 1):
                    error = trials.of(ladder.alone(rest, place), self.tolerance).error
                    ladder = ladder.with_score(rest, place, error)
        return ladder

    def _descend(self, ladder: FormatLadder, trials: TrialRunner) -> tuple[Assignment, bool]:
        """Return the cheapest assignment found to pass, and whether the limit on trials ended the search."""

        def passes(assignment: Assignment) -> bool:
            return assignment == ladder.widest or trials.of(assignment, self.tolerance).error <= self.tolerance

        try:
            return cheapest_passing(ladder, passes), False
        except TrialsSpent:
            return min([ladder.widest, *trials.passed(self.tolerance)], key=ladder.cost), True

    def _alone_narrower(
        self, ladder: FormatLadder, best: Assignment, trials: TrialRunner
    ) -> dict[int, tuple[int, SearchTrial]]:
        """Try units above their cheapest format with the next narrower one, each alone.

        If that exceeds the tolerance, no assignment passes in which the unit has it.
        """
        raised = [unit for unit, place in enumerate(best) if place > ladder.lowest[unit]]
        worst = sorted(raised, key=lambda unit: -ladder.scores[unit][best[unit] - 1])[:MOST_ALONE]
        found: dict[int, tuple[int, SearchTrial]] = {}
        with suppress(TrialsSpent):
            for unit in worst:
                place = best[unit] - 1
                found[unit] = place, trials.of(ladder.alone(unit, place), self.tolerance)
        return found

"""``ampwise.search``: find the cheapest formats that pass, from a function and batches.

The search descends from all wide to what passes on most of the batches. Then the result is verified on the batches held
back; if it fails there, more modules are made wider.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from ampwise.hardware import Gpu
from ampwise.train.arguments import model_device
from ampwise.tune.search.arguments import (
    checked_batches,
    checked_file,
    checked_gpu,
    checked_limit,
    checked_model,
    checked_tolerance,
)
from ampwise.tune.search.arrangement import DEFAULT_FORMATS, FormatChoice, parse_formats
from ampwise.tune.search.build_result import (
    Alone,
    ModuleGlobs,
    cost_gap,
    estimate_gain,
    rank_modules,
    spans,
    unit_costs,
)
from ampwise.tune.search.descent import Assignment, FormatLadder, cheapest_passing, raise_until_passing
from ampwise.tune.search.fp32_error import ParameterGroups, measure_noise, run_reference
from ampwise.tune.search.passes import PassRunner, SearchBatch
from ampwise.tune.search.progress import Progress, ProgressCounter
from ampwise.tune.search.result import SearchResult, Verification
from ampwise.tune.search.sensitivity import SensitivityProbe, UnitProbe, scores_of
from ampwise.tune.search.trials import SearchTrial, TrialRunner, TrialsSpent, TrialStore, digest_of
from ampwise.tune.search.units import REST, SearchUnit, find_units, select_units

MOST_ALONE = 8  # modules measured by themselves

Looks = Callable[[Sequence[SearchBatch]], Mapping[str, UnitProbe]]


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

    Formats of 8 bits and fewer are emulated, so no hardware support is needed.

    Weights, buffers, gradients and random number generators are restored.

    Args:
        fn: ``fn(*batch)`` returns the loss.
        batches: a few representative ones, of which a quarter is held back for verification.
        tolerance: of the loss, relative; and of the progress that a step makes in each module: half of the squared
            relative error of its gradient. Two FP32 runs are compared first, and a tolerance below their difference is
            refused.
        formats: names, including "fp32", for what must stay wide.
        model: needed if it is neither ``fn`` nor the one module that ``fn`` calls.
        modules: patterns of modules to search; the others stay in FP32.
        gpu: the GPU whose datasheet the predicted time is based on; by default the one in this machine.
        trials: how many assignments may be tried; if verification fails, as many again.
        resume: a file that keeps the trials, from which an interrupted search continues. It is removed at the end.
        progress: called with the state of the search.
        name: what the result calls the model; by default its class.

    Returns:
        the formats by module; ``found.apply(model)`` applies them, ``found.policy`` is for an Engine.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

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
    """
    checked, choices, file = checked_tolerance(tolerance), parse_formats(formats), checked_file(resume)
    given, left_out = checked_batches(fn, batches)
    found_model = checked_model(fn, model, given[0])
    searching = _Search(fn, found_model, given, choices, checked, modules, progress)
    target = checked_gpu(gpu, searching.passes.device)
    limit = checked_limit(trials, len(searching.units))
    return searching.run(name or type(found_model).__name__, limit, file, target, left_out)


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
        self.left_wide = [unit for unit in every if unit not in self.units]
        self.problem: str | None = None  # of a trial that did not run
        trials = 4 + 2 * math.ceil(math.log2(len(self.units) + 1))
        self.pace.expected = len(self.batches) * (2 + trials) + 2 + 3 * len(self.held_back)

    def run(self, name: str, limit: int, path: Path | None, gpu: Gpu | None, left_out: str | None) -> SearchResult:
        """Run the search. Problems of the function in FP32 are raised before anything is tried."""
        passes, model, every = self.passes, self.passes.model, [*self.units, *self.left_wide]
        groups = ParameterGroups(model, passes.parameters)
        self.pace.tell("FP32 reference")
        reference = run_reference(passes, groups, self.batches)
        unseen = run_reference(passes, groups, self.held_back)
        self.pace.tell("FP32 again, to measure noise")
        noise = measure_noise(passes, reference, self.batches, self.tolerance)
        # Digests by part, so that a mismatch can be named. FP32's losses identify the function.
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fingerprint = {
            "modules": digest_of([f"{unit.name}:{unit.kind}" for unit in every]),
            "weights": digest_of(state),
            "batches": digest_of([(batch.args, batch.kwargs) for batch in (*self.batches, *self.held_back)]),
            "formats": [choice.name for choice in self.choices],
            "tolerance": self.tolerance,
            "losses in FP32": [*reference.losses, *unseen.losses],
            "device": passes.device.type,
            "torch": torch.__version__,
        }
        store = TrialStore(path, fingerprint)
        trials, held = (
            TrialRunner(stage, passes, every, self.choices, wide, batches, store, self._report, limit)
            for stage, wide, batches in (("search", reference, self.batches), ("verify", unseen, self.held_back))
        )
        try:
            looks = self._looks(self.batches[:1])
            ladder = self._ladder(looks, trials)
            best, spent = self._descend(ladder, trials)
            alone = self._alone_narrower(ladder, best, trials)
            trials.limit = math.inf
            checked = verify(held, trials, ladder, best, self.units, self.tolerance, self._looks)
            tried = trials.count + held.count
            kept = [passes.kept_bytes(self.batches[0], trials.arranged(each)) for each in (checked.best, ladder.widest)]
            found = trials.whole(checked.best)
        except BaseException:
            store.write()
            raise
        store.remove()
        best, alone = checked.best, {**alone, **checked.alone}
        chosen = [*(self.choices[place] for place in best), *[self.choices[-1]] * len(self.left_wide)]
        arrangement, patterns = trials.arranged(best), ModuleGlobs(model)
        flops = sum(unit.flops for unit in every)
        notes = [] if left_out is None else [left_out]
        return SearchResult(
            name=name,
            formats=tuple(choice.name for choice in self.choices),
            tolerance=self.tolerance,
            noise=noise,
            error=found.error,
            loss_error=found.loss,
            gradient_error=found.gradient,
            worst=found.worst,
            modules={unit.name: choice.name for unit, choice in zip(every, chosen, strict=True)},
            policy=patterns.policy(arrangement),
            narrow=patterns.narrow(every, chosen),
            widened=tuple(patterns.of(arrangement.widened)),
            ranking=rank_modules(self.units, self.choices, best, ladder, looks | checked.looks, alone, flops),
            gain=estimate_gain(every, chosen, self.choices, gpu, (kept[0], kept[1])),
            gap=cost_gap(ladder, best, alone, self.tolerance),
            verified=checked.verified,
            batches=len(self.batches) + len(self.held_back),
            trials=tried,
            spent=spent or checked.spent,
            passes=passes.count,
            seconds=time.monotonic() - self.began,
            device=str(passes.device),
            notes=(*notes, *self._notes(spent or checked.spent, store.resumed)),
        )

    def _looks(self, batches: Sequence[SearchBatch]) -> dict[str, UnitProbe]:
        self.pace.tell("probing each module")
        only = {unit.name for unit in self.units}
        probe = SensitivityProbe([*self.units, *self.left_wide], self.choices, self.passes.device, only=only)
        for batch in batches:
            self.passes.watched(batch, probe)
        return probe.looks

    def _report(self, stage: str, trial: SearchTrial) -> None:
        counts = [f"{trial.assignment.count(place)} in {choice.name}" for place, choice in enumerate(self.choices)]
        shown = ", ".join(text for text in counts if not text.startswith("0 "))
        shown = f"held back: {shown}" if stage == "verify" else shown
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

    def _alone_narrower(self, ladder: FormatLadder, best: Assignment, trials: TrialRunner) -> Alone:
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

    def _notes(self, spent: bool, resumed: int) -> Iterator[str]:
        if spent:
            yield "the search reached its limit of trials; with a higher trials= it may find a cheaper policy"
        if self.problem is not None:
            yield f"some trials did not run, and count as failed: {self.problem}"
        if not self.held_back:
            yield "there was only one batch, so nothing was held back for verification"
        whole = [unit.name for unit in self.units if not unit.emulated]
        if REST in whole:
            yield "matmuls outside of any module are not emulated, and have at least 16 bits"
        if layers := spans(name for name in whole if name != REST):
            yield f"recurrent layers are not emulated, and have at least 16 bits: {', '.join(layers)}"
        if self.left_wide:
            yield f"{len(self.left_wide)} modules were not searched, and stay in FP32"
        if resumed:
            yield f"{resumed} trials came from an earlier run"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSearch:
    """Result of the verification. ``looks`` and ``alone`` cover raised units, on the batches that required it."""

    verified: Verification | None
    best: Assignment
    looks: dict[str, UnitProbe] = field(default_factory=dict)
    alone: Alone = field(default_factory=dict)
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
    scores = [
        scores_of(seen[unit.name], held.choices) if unit.name in seen else before
        for unit, before in zip(units, ladder.scores, strict=True)
    ]
    ladder = replace(ladder, scores=tuple(scores))
    # Measure the likely causes by themselves, as an estimate may be wrong. Half of the trials are left for raising.
    alone: dict[int, SearchTrial] = {}
    with suppress(TrialsSpent):
        for unit in ladder.most_in_need(best)[: int(min(MOST_ALONE, held.limit / 2))]:
            alone[unit] = held.of(ladder.alone(unit, best[unit]), tolerance)
    for unit, trial in alone.items():
        ladder = ladder.with_score(unit, best[unit], trial.error)

    def passes(assignment: Assignment) -> bool:
        if assignment == ladder.widest:
            return True
        return all(each.of(assignment, tolerance).error <= tolerance for each in (held, trials))

    spent = False
    try:
        raised = raise_until_passing(ladder, best, passes)
    except TrialsSpent:
        both = [each for each in held.passed(tolerance) if each in trials.passed(tolerance)]
        raised, spent = min([ladder.widest, *both], key=ladder.cost), True
    changed = [unit for unit, (was, now) in enumerate(zip(best, raised, strict=True)) if was != now]
    names = [units[unit].name for unit in changed]
    return VerifiedSearch(
        verified=replace(verified, raised=tuple(names), error_after=held.whole(raised).error),
        best=raised,
        looks={name: seen[name] for name in names if name in seen},
        alone={unit: (best[unit], alone[unit]) for unit in changed if unit in alone},
        spent=spent,
    )

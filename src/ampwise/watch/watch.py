"""Watch a script: torch's entry points → events and gradients → rules → findings, and a record of them."""

from __future__ import annotations

import linecache
import math
import os
import threading
import time
import traceback
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.runs.events import LoggedEvent
from ampwise.runs.rows import CountedFinding, StepRow
from ampwise.runs.writer import RecordWriter, exception_data
from ampwise.watch.activations import ActivationRanges, Activations
from ampwise.watch.advice import is_cause, point_to_cause
from ampwise.watch.bad_steps import BadStepReplays
from ampwise.watch.dtype_flow import DtypeFlow
from ampwise.watch.engine_listener import EngineListener
from ampwise.watch.entry_points import EntryPoints
from ampwise.watch.findings import Findings
from ampwise.watch.fix_diffs import add_diffs
from ampwise.watch.forks import notify_of_forks
from ampwise.watch.gradient_health import BadStep, GradientHealth
from ampwise.watch.gradients import GradientReader, StepNumbers
from ampwise.watch.inspection import is_on_cpu, precisions_of, stage_of, unwrapped
from ampwise.watch.memory import OptimizerMemory
from ampwise.watch.model_calls import ModelCalls, SkippedCall
from ampwise.watch.models import Models, names_of, outermost_running_module
from ampwise.watch.passed_checks import list_passed_checks
from ampwise.watch.patches import Patches
from ampwise.watch.run_events import OptimizerStep, RunEvent, ScalerStep, ScriptFailed
from ampwise.watch.scaler_settings import suggested_settings
from ampwise.watch.step_outcomes import is_ours, outcome_of
from ampwise.watch.step_replay import StepToReplay
from ampwise.watch.step_skipper import StepSkipper
from ampwise.watch.time_use import TimeUse
from ampwise.watch.timing import RunTiming
from ampwise.watch.tracked_objects import TrackedOptimizer
from ampwise.watch.tracker import CallTracker
from ampwise.watch.weight_updates import WeightComparison, copy_weights

__all__ = ["Watch"]

JUDGED_AGAIN = 1.25  # gradient health is judged at steps that grow by this factor, so that it costs less and less
FIRST_JUDGEMENT = 20
WRITTEN_EVERY = 2.0  # seconds between writes of findings while the script runs
FEW_OPTIMIZERS = 8  # up to this many are written as soon as they are known
SEARCHED_PASSES = 2  # first passes of a model, in which a model that contains it is searched for
ARMED_FOR = 3  # steps after a non-finite loss, in which activations are measured
UPDATES_EVERY = 10  # steps between checks of whether BF16 weights change
PROFILED = (6, 200)  # steps to profile
AROUND = 6  # lines of an excerpt before and after its line


class Watch:
    """Watch everything a script does from ``install`` to ``remove``.

    record: where to write; None keeps the results in memory. every: count gradients in full at each n-th step; None: as
    often as one per cent of the time allows. activations: measure modules' outputs at every step. capsules: a folder to
    save bad steps in (they are replayed in any case); weights: save the model's weights with them.
    """

    def __init__(
        self,
        record: RecordWriter | None = None,
        *,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        capsules: Path | None = None,
        weights: bool = True,
    ) -> None:
        self.findings = Findings()
        self.events: list[LoggedEvent] = []  # of guards
        self.healths: dict[int, GradientHealth] = {}
        self.failures: list[str] = []  # errors of ampwise, which never reach the script
        self.steps = 0
        self._record = record
        self._always_measures = activations
        self._with_timing = timing
        self._pid = os.getpid()
        self._began, self._folder = time.time(), _folder_here()
        self._tracker = CallTracker(self._tell)
        self._skipper = StepSkipper(allowed=every is None and not activations)
        self._gradients = GradientReader(self._known, every)
        self._activations = Activations(self.failed)
        self._flow = DtypeFlow(self.failed)
        self._calls = ModelCalls()
        self._skipper.random_models = self._calls.uses_torch_random
        self._bad_steps = BadStepReplays(
            self._calls, self._tracker.follows, self.failed, capsules=capsules, weights=weights
        )
        self._engines = EngineListener(
            self.explained, self._log, self._tracker.follows.paused, capsules, weights=weights
        )
        self._searched: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._stepped_by: dict[int, Any] = {}  # scaler or None, by optimizer whose gradients are ready
        self._ran: set[tuple[int, int]] = set()  # (optimizer, step) that may have changed weights
        self._replayed: set[tuple[int, int]] = set()  # (optimizer, step) replayed before the step was made
        self._memory = OptimizerMemory()
        self._names: dict[int, list[str]] = {}
        self._described: dict[int, tuple[str, list[str]]] = {}  # by optimizer: its class, and its models' classes
        self._early_written: object = None  # facts written to the record before the end
        self._early_written_at = -math.inf
        self._armed = 0
        self._bad_module: str | None = None
        self._poisoned: set[int] = set()  # optimizers whose weights were updated with non-finite gradients
        self._unread: set[int] = set()  # optimizers whose last gradients were not read
        self._ranges: list[tuple[int, ActivationRanges]] = []
        self.largest: dict[str, tuple[str, float]] = {}  # by module: dtype and largest magnitude
        self._compared: dict[int, WeightComparison] = {}
        self._updates: list[tuple[TrackedOptimizer, int, WeightComparison]] = []
        self._judge_at = FIRST_JUDGEMENT
        self._written = time.monotonic()
        self._kinds: dict[str, int] = {}  # number of events by class
        self._patches: Patches | None = None
        self._not_measured: dict[str, None] = {}
        self._timing: RunTiming | None = None
        self.time_use: TimeUse | None = None

    # On and off

    def install(self) -> Watch:
        """Start watching."""
        if self._patches is None:
            self._patches = Patches()
            self._models = Models(
                self._patches,
                self._model_begins,
                self._model_ends,
                self.failed,
                self._skipper,
                self._before_compile,
            )
            self._entry_points = EntryPoints(self._patches, self._tracker, self, self._skipper)
            to_come = [step for step in PROFILED if step > self.steps]
            self._timing = RunTiming(self._patches, profile_at=to_come) if self._with_timing else None
            for optimizer, _ in self._tracker.optimizers.pairs():  # from an earlier installation
                self.optimizer_made(optimizer)
            self._engines.listen()
            notify_of_forks(self)
        return self

    def remove(self) -> None:
        """Restore torch as it was."""
        if self._patches is not None:
            self.follow_again()
            if self._timing is not None:
                self._timing.abandon()
                self.time_use = self._timing.use(self._autocast())
                self._timing = None
            self._engines.leave()
            self._activations.end()
            self._flow.remove()
            self._models.forget()
            self._calls.forget()
            self._entry_points.remove()
            self._patches.undo()
            self._patches = None

    def about_to_fork(self) -> None:
        if self._timing is not None:
            self._timing.about_to_fork()

    def forked(self) -> None:
        """Stop watching in a forked child: the record belongs to its parent."""
        timing, patches, self._timing, self._patches = self._timing, self._patches, None, None
        if patches is None:
            return
        self._tracker.follows.stop()
        self._record = None
        if timing is not None:
            timing.forked()
        self._engines.leave()
        self._activations.end()
        self._flow.remove()
        self._models.forget()
        patches.undo()  # the optimizers' step hooks stay, as one may be running; they do nothing

    def adopt(self, things: Iterable[Any]) -> None:
        """Register models, optimizers and scalers that were made before."""
        every = list(things) if self._patches is not None else []
        for model in (each for each in every if isinstance(each, nn.Module)):
            self._models.remember(model)
        for function in (each for each in every if isinstance(each, FunctionType)):
            self._models.remember_function(function)
        for optimizer in (each for each in every if isinstance(each, Optimizer)):
            self.optimizer_made(optimizer)
        for scaler in (each for each in every if isinstance(each, GradScaler)):
            self._entry_points.wrap_scaler(type(scaler))
            self._tracker.scaler_state(scaler)

    def replaced(self) -> list[tuple[Any, Any]]:
        """Return (original, replacement) for each replaced function."""
        return [] if self._patches is None else self._patches.pairs()

    def __enter__(self) -> Watch:
        return self.install()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.died(error)
        self.close("finished" if error is None else "failed")

    def close(self, status: str = "finished", exit_code: int | None = None, error: BaseException | None = None) -> None:
        """End the watch: judge the whole run, and finish the record."""
        if os.getpid() != self._pid:  # a forked child: the record belongs to its parent
            return
        try:
            self._gradients.settle(wait=True)
            self._settle_others(wait=True)
            self.remove()
            self._judge_all()
            add_diffs(self.seen(), self._folder, self._began)
        except Exception as problem:
            self.failed(problem)
        self._write_end(status, exit_code, error)

    def died(self, error: BaseException) -> None:
        """Report an exception that ended the script."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_own(each.filename)]
        site = CallSite(file=frames[-1].filename, line=frames[-1].lineno) if frames else CallSite()
        summary = exception_data(error)
        self._tell(ScriptFailed(site=site, error=summary["type"], message=summary["message"]), self._tracker.steps + 1)

    # Calls from the entry points

    def _model_begins(self, model: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        begun = self._tracker.model_begins(model)
        if begun is not None:
            event, states = begun
            self._find_outer_model(model, states)
            self._calls.begins(model, args, kwargs or {}, [state.index for state in states], event)

    def _find_outer_model(self, model: nn.Module, states: Sequence[TrackedOptimizer]) -> None:
        """Find a larger model around this one, in its first passes, whose ``parameters()`` was never called."""
        if states and self._searched.get(model, 0) < SEARCHED_PASSES:
            self._searched[model] = self._searched.get(model, 0) + 1
            whole = outermost_running_module()
            if whole is not None and whole is not model:
                self._models.watch(whole)  # from the next pass on
                for state in states:
                    self._tracker.trains(whole, state)

    def _model_ends(self, model: nn.Module, args: Any = (), output: Any = None) -> None:
        if self._tracker.model_ends(model):
            self._calls.ends(output)

    # Skipped steps

    def step_over(self, optimizer: Any) -> None:
        """Start to skip steps if following is expensive, and no optimizer has pending gradients."""
        steps = self._skipper.step_followed()
        if not steps or not self._may_skip():
            return
        indices = {id(each): state.index for each, state in self._tracker.optimizers.pairs()}
        self._calls.forget()
        if self._timing is not None:
            self._timing.skips_steps(True)
        self._skipper.begin(unwrapped(optimizer), indices, steps)

    def _before_compile(self) -> None:
        """Stop skipping steps before something is compiled, as changing hooks would recompile it."""
        self._skipper.never_skip_again()
        self.follow_again()
        self._flow.stop()

    def _may_skip(self) -> bool:
        states = self._tracker.optimizers.states()
        busy = self._armed or self._flow.on or self._gradients.pending or any(state.pending for state in states)
        measuring = self._timing is not None and self._timing.measuring
        compiled = self._models.has_compiled_functions or self._models.has_compiled
        return not (busy or measuring or compiled) and all(
            is_on_cpu(each) for each, _ in self._tracker.optimizers.pairs()
        )

    def follow_again(self) -> None:
        if not self._skipper.on:
            return
        steps = self._skipper.end()
        self.steps += sum(steps.values())
        self._tracker.add_skipped_steps(steps)
        self._unread |= steps.keys() - self._poisoned  # the gradients of skipped steps were not read
        if self._timing is not None:
            self._timing.skips_steps(False)
        passed, self._skipper.last_call = self._skipper.last_call, None
        known = None if passed is None else self._tracker.last_pass_of(passed[0])
        if passed is not None and known is not None:
            self._calls.adopt(SkippedCall(*passed), known[1], known[0])

    def optimizer_made(self, optimizer: Any) -> None:
        self._watch_models_of(optimizer)
        self._models.forget_found()  # models may change before the first step

    def _watch_models_of(self, optimizer: Any) -> list[nn.Module]:
        state = self._tracker.state_of(optimizer)
        models = self._models.of(optimizer)
        for model in models:
            for each in (model, self._models.around(model)):  # it may be the same
                self._models.watch(each)
                self._tracker.trains(each, state)
            if self._always_measures:
                self._activations.begin(model)
        return models

    def gradients_ready(self, optimizer: Any, scaler: Any | None) -> None:
        self._stepped_by[self._tracker.state_of(optimizer).index] = scaler
        if is_ours(scaler) or _capturing():
            return  # it reads them itself; or a CUDA graph would repeat this at each replay
        state = self._tracker.state_of(optimizer)
        with self._paused():
            self._gradients.ready(optimizer, _scale_of(optimizer, state, scaler), state)

    def step_begins(self, optimizer: Any) -> None:
        if _capturing():
            return
        state = self._tracker.state_of(optimizer)
        scaler = self._stepped_by.pop(state.index, None)
        if not is_ours(scaler):  # an engine examines its own steps
            with self._paused():
                self._look_before_update(optimizer, state, scaler)
            self._calls.update_begins(state.index)
        if state.steps % UPDATES_EVERY == 0:
            compared = copy_weights(optimizer, self._names_of(optimizer, state))
            if compared is not None:
                self._compared[state.index] = compared

    def step_taken(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        if _capturing():
            self._not_measured["Steps in a CUDA graph: replays are not visible to the host."] = None
            return
        with self._paused():
            self._process_step(optimizer, scaler, ran=ran)
        if self._timing is not None and threading.current_thread() is threading.main_thread():
            self._timing.step_ended(self.steps)

    def _paused(self) -> AbstractContextManager[None]:
        """Return a context that leaves ampwise's own work out of the timing."""
        return nullcontext() if self._timing is None else self._timing.paused()

    def _process_step(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        state = self._tracker.state_of(optimizer)
        names = self._names_of(optimizer, state)
        compared = self._compared.pop(state.index, None)
        if compared is not None and ran:
            compared.after_step()
            self._updates.append((state, state.steps + 1, compared))
        self._health_of(optimizer, state, scaler)
        ranges = self._activations.collect()
        if ranges is not None:
            self._ranges.append((state.steps + 1, ranges))
        self._settle_others()  # before the step, whose judgement uses activations
        outcome = outcome_of(optimizer, scaler, ran=ran)
        self._calls.step_over(state.index, ran=ran)
        self._ran |= {(state.index, state.steps + 1)} if ran else set()
        self._gradients.step_ended(optimizer, state, names, outcome)
        if not ran and self._gradients.pending:
            self._gradients.settle(wait=True)  # the scaler has already synced, and skipped the step
        if is_ours(scaler):
            self._calls.ignore(state.index)  # the engine explains its steps itself
        if not outcome.flags or is_ours(scaler):
            self._calls.settled(state.index)
        self._step_over(optimizer, state)
        self._measure_once(optimizer, state, ran=ran)
        self._models.forget_found()

    def scheduler_moved(self, scheduler: Any) -> None:
        moved = self._tracker.scheduled(scheduler)
        if moved is not None:
            state, event = moved
            step = state.steps
            self._gradients.when_known(state, lambda skipped: self._tell(replace(event, after_skip=skipped), step))

    def failed(self, error: Exception) -> None:
        """Note an error of ampwise's own."""
        if len(self.failures) < 20:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")  # noqa: PTH119
        if os.environ.get("AMPWISE_DEBUG"):
            raise error

    # Steps

    def _step_over(self, optimizer: Any, state: TrackedOptimizer) -> None:
        self.steps += 1
        if self._armed and not self._always_measures:
            self._armed -= 1
            for model in self._models.of(optimizer) if self._armed else ():
                self._activations.begin(model)
            if not self._armed:
                self._activations.end()
        if self.steps >= self._judge_at:
            self._judge_at = int(self.steps * JUDGED_AGAIN) + 1
            for health in self.healths.values():
                self.findings.judge_whole(health)
        self._write_findings()
        self._write_early_facts()

    def _measure_once(self, optimizer: Any, state: TrackedOptimizer, *, ran: bool) -> None:
        """Measure memory and dtypes, once per optimizer. A failure does not affect the step's count."""
        try:
            if ran:
                self._memory.take(state.index, unwrapped(optimizer), lambda: self._models.of(optimizer))
            self._flow.step_over(state.index, optimizer, self._models, free=not self._profiled_soon())
        except Exception as error:
            self.failed(error)

    def _profiled_soon(self) -> bool:
        """Whether a profile is due before each optimizer has made its next step."""
        return any(self.steps < step <= self.steps + len(self.healths) for step in PROFILED)

    def _settle_others(self, *, wait: bool = False) -> None:
        """Read activation ranges and weight comparisons that have arrived."""
        while self._ranges and (wait or self._ranges[0][1].posted.arrived):
            self._read_ranges(*self._ranges.pop(0))
        while self._updates and (wait or self._updates[0][2].arrived):
            state, step, compared = self._updates.pop(0)
            if state.index in self.healths:
                self.healths[state.index].add_updates(step, compared.shares())

    def _read_ranges(self, step: int, ranges: ActivationRanges) -> None:
        for name, dtype, value in ranges.read():
            bad = not math.isfinite(value)
            if bad and self._bad_module is None:
                self._bad_module = name
            known = self.largest.get(name, (dtype, 0.0))[1]
            self.largest[name] = (dtype, value if bad or value > known else known)

    def _known(self, state: TrackedOptimizer, known: StepNumbers) -> None:
        row, health = known.row, self.healths.get(state.index)
        self._explain_if_bad(state, known)
        self._calls.settled(state.index)
        if health is None:
            return
        health.add_step(row)
        if known.sample is not None:
            health.add_sample(known.sample)
        if not known.finite and (known.bad or not row.finite):
            self._bad_step(health, known)
        self._note_unread(row)
        if self._record is not None:
            self._record.step(row)
            if known.sample is not None and row.step % self._record.sample_every(row.step) == 0:
                self._record.layers(known.sample)

    def _bad_step(self, health: GradientHealth, known: StepNumbers) -> None:
        row = known.row
        healthy = None if row.optimizer in self._unread else row.optimizer not in self._poisoned
        if not row.skipped:
            self._poisoned.add(row.optimizer)  # non-finite gradients spoil all weights
        loss_is_bad = row.loss is not None and not math.isfinite(row.loss)
        if loss_is_bad and row.skipped and not self._activations.on and not self._armed and not self._bad_module:
            self._armed = ARMED_FOR + 1  # the weights are still good: measure activations in the next steps
        health.add_bad(
            BadStep(
                step=row.step,
                loss=row.loss,
                scale=row.scale,
                parameters=known.bad,
                module=self._bad_module,
                healthy_before=healthy,
            )
        )

    def _note_unread(self, row: StepRow) -> None:
        """Note whether weights were updated with gradients that were not read; a scaler checks them itself."""
        if not row.skipped:
            unknown = row.norm is None and row.scale is None and row.optimizer not in self._poisoned
            (self._unread.add if unknown else self._unread.discard)(row.optimizer)

    # Why a step was bad

    def _look_before_update(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None) -> None:
        """Replay a bad step before its update, while the weights are those it ran with."""
        if self._gradients.pending:
            self._settle_others()
            self._gradients.settle()
        if state.index in self._poisoned:
            return
        bad = self._gradients.bad_already(optimizer, state, scaled=scaler is not None)
        if bad is not None:
            scale = None if scaler is None else float(scaler._scale)
            self._replayed.add((state.index, state.steps + 1))
            self._explain(StepToReplay(state.steps + 1, bad[0], scale, (unwrapped(optimizer),)))
        if scaler is None:  # a scaler may still skip the step
            self._calls.settled(state.index, now=True)

    def _explain_if_bad(self, state: TrackedOptimizer, known: StepNumbers) -> None:
        row, key = known.row, (state.index, known.row.step)
        if key in self._ran and row.skipped:
            self._calls.was_skipped(state.index)
        self._ran.discard(key)
        is_bad = row.skipped or not known.finite
        if not is_bad or state.index in self._poisoned or self._calls.is_ignored(state.index):
            return
        optimizers = [each for each, other in self._tracker.optimizers.pairs() if other is state]
        step = StepToReplay(row.step, row.loss, row.scale, tuple(optimizers))
        if key in self._replayed:
            self._replayed.discard(key)
        elif row.skipped:
            self._explain(step)
        else:
            self._bad_steps.came_too_late(step)

    def _explain(self, step: StepToReplay) -> None:
        for finding in self._bad_steps.explain(step):
            self.explained(finding, step.number)

    def explained(self, finding: Finding, step: int | None = None) -> None:
        """Add a finding about a bad step, from a replay by the watch or by an engine."""
        self.findings.add(finding, step)

    def _log(self, event: LoggedEvent) -> None:
        self.events.append(event)
        if self._record is not None:
            self._record.event(event)

    def _health_of(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None) -> GradientHealth:
        health = self.healths.get(state.index)
        if health is None:
            health = self.healths[state.index] = GradientHealth(state.index, names=self._names_of(optimizer, state))
        ran_in, kept = self._tracker.precisions_since_step(state), precisions_of(optimizer)
        half = next((each for each in ("fp16", "bf16") if each in ran_in or kept == (each,)), None)
        health.precision = half or health.precision
        if scaler is not None and scaler._enabled and health.growth_interval is None:
            health.growth_interval, health.backoff_factor = scaler._growth_interval, scaler._backoff_factor
        return health

    def _names_of(self, optimizer: Any, state: TrackedOptimizer) -> list[str]:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._names.get(state.index)
        if known is None or len(known) != count:  # a parameter group was added
            models = self._watch_models_of(optimizer)  # models may have been made since
            known = self._names[state.index] = names_of(optimizer, models)
            self._described[state.index] = (state.name, [type(model).__name__ for model in models])
        return known

    def _autocast(self) -> str | None:
        """Return the 16-bit format that the training ran in, if any."""
        return next((each.precision for each in self.healths.values() if each.precision != "fp32"), None)

    # Judging and writing

    def _tell(self, event: RunEvent, step: int) -> None:
        kind = type(event).__name__
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if isinstance(event, ScalerStep | OptimizerStep) and event.backwards > 1:
            self._kinds["Accumulation"] = self._kinds.get("Accumulation", 0) + 1
        self.findings.judge(event, step)

    def _judge_all(self) -> None:
        events = self._tracker.finish()
        events.bf16_emulated_on = _bf16_emulated_on(events.forwards)
        self.findings.judge_whole(events)
        for health in self.healths.values():
            self.findings.judge_whole(health)
        if self.time_use is not None:
            self.findings.judge_whole(self.time_use)

    def _write_findings(self) -> None:
        now = time.monotonic()
        if self._record is not None and self.findings.changed and now - self._written > WRITTEN_EVERY:
            self._written = now
            self.findings.changed = False
            self._record.findings(self.seen())

    def _write_early_facts(self) -> None:
        """Write precision and optimizers to the record as soon as they are known, for readers of a running script."""
        if self._record is None or self._early_written == (self._precision(), self._described):
            return
        now = time.monotonic()
        if len(self._described) > FEW_OPTIMIZERS and now - self._early_written_at < WRITTEN_EVERY:
            return  # each one would write the whole list again
        self._early_written_at = now
        self._early_written = (self._precision(), dict(self._described))
        for name, value in self._early_facts().items():
            self._record.fact(name, value)

    def seen(self) -> list[CountedFinding]:
        """Return the findings so far, worst first, each with an excerpt of the source."""
        found = list(self.findings)
        known = any(is_cause(each.finding) for each in found)
        point_to_cause(found, known=known, after_model=self._bad_steps.after_model)
        for each in found:
            each.excerpt = each.excerpt or _excerpt(each.finding.place.file, each.finding.place.line)
        return found

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run other than findings."""
        settings = [each for health in self.healths.values() if (each := suggested_settings(health)) is not None]
        return {
            "steps": self._tracker.steps,
            **self._early_facts(),
            "what_was_fine": list_passed_checks(self._tracker.run_events, self._kinds, self.seen(), self.healths),
            "not_measured": self.not_measured(),
            "timing": None if self.time_use is None else self.time_use.as_dict(),
            "settings": [
                {"name": name, "value": each.arguments[name], "reason": reason}
                for each in settings
                for name, reason in each.reasons
            ],
            "dtype_flow": self._flow.rows(),
            "memory": self._memory.facts(),
            "activations": {name: {"dtype": dtype, "largest": value} for name, (dtype, value) in self.largest.items()},
        }

    def _early_facts(self) -> dict[str, Any]:
        """Return facts that are known after the first steps and seldom change."""
        return {"precision": self._precision(), "optimizers": self._optimizers()}

    def _precision(self) -> str | None:
        return next((health.precision for health in self.healths.values()), None)

    def _optimizers(self) -> list[dict[str, Any]]:
        """Return index, class and models of each optimizer."""
        return [
            {"index": index, "name": name, "model": " and ".join(models)}
            for index, (name, models) in sorted(self._described.items())
        ]

    def not_measured(self) -> list[str]:
        """Return sentences on what was not measured, and why."""
        sentences = [*self._not_measured, *self._bad_steps.sentences]
        if self._tracker.follows.others:
            sentences.append("Several threads trained at the same time; only one of them was followed.")
        if self.failures:
            sentences.append(f"Some calls could not be followed: {self.failures[0]}")
        if not self._always_measures:
            sentences.append("Activations were not measured; use --activations.")
        sentences += [*self._flow.not_measured(), *self._memory.not_measured()]
        return sentences + list(getattr(self.time_use, "not_measured", ()))

    def _write_end(self, status: str, exit_code: int | None, error: BaseException | None) -> None:
        if self._record is not None:
            for name, value in self.facts().items():
                self._record.fact(name, value)
            self._record.findings(self.seen())
            self._record.close(status, exit_code, error)


def _scale_of(optimizer: Any, state: TrackedOptimizer, scaler: Any | None) -> Any:
    """Return the scale of the gradients in memory; None if they are not scaled."""
    if state.scaled is not None:
        known = state.scaler
        scaler = scaler if known is None else known
        return None if scaler is None else scaler._scale
    # The optimizer was unknown during the backward pass: a scaler that steps it takes its gradients for scaled.
    if scaler is None or state.pending or stage_of(scaler, optimizer) is OptState.UNSCALED:
        return None
    return scaler._scale


def _folder_here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # the folder was removed
        return ""


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_own(file: str) -> bool:
    from ampwise.trace.call_site import code_owner

    return code_owner(file) == "own"


def _bf16_emulated_on(forwards: Sequence[Any] | dict[Any, int]) -> str | None:
    if not any(forward.precision == "bf16" and forward.device == "cuda" for forward in forwards):
        return None
    from ampwise.hardware.torch_info import read_device

    device = read_device(torch, 0)
    return device.name if device.bf16_native is False else None


def _excerpt(file: str | None, line: int | None) -> dict[str, Any]:
    if file is None or line is None:
        return {}
    lines = linecache.getlines(file)
    first = max(line - AROUND, 1)
    return {"first_line": first, "lines": [each.rstrip("\n") for each in lines[first - 1 : line + AROUND]]}

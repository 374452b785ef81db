"""Watch a script: torch's entry points → events and gradients → rules → findings, and a record of them."""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import threading
import time
import traceback
from collections.abc import Iterable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.finding.call_site import CallSite
from ampwise.hardware.torch_info import read_device
from ampwise.runs.events import EVENT_LISTENERS, LoggedEvent
from ampwise.runs.rows import CountedFinding
from ampwise.runs.writer import RecordWriter, exception_data
from ampwise.trace import bad_steps
from ampwise.trace.call_site import code_owner
from ampwise.trace.capsule.saving import SHARED_CAPSULES, Capsules
from ampwise.trace.replay import OptimizerPast, is_finite
from ampwise.watch.entry_points import EntryPoints
from ampwise.watch.findings import Findings, is_cause, list_passed_checks, point_to_cause
from ampwise.watch.fix_diffs import add_diffs
from ampwise.watch.gradient_health import BadStep, GradientHealth, suggested_settings
from ampwise.watch.gradients import (
    GradientReader,
    ReadStep,
    WeightComparison,
    are_finite_on_host,
    copy_weights,
    is_ours,
    outcome_of,
)
from ampwise.watch.half_averages import HalfAverages
from ampwise.watch.inspection import dtype_name, is_capturing, parameters_of, precisions_of, stage_of, unwrapped
from ampwise.watch.learning import Learning
from ampwise.watch.learning_watch import LearningWatch
from ampwise.watch.loop_watch import LoopWatch
from ampwise.watch.loss_code import only_assignment_of
from ampwise.watch.memory import OptimizerMemory
from ampwise.watch.model_calls import KeptLoss, ModelCalls
from ampwise.watch.models import Hook, Models, names_of, outermost_running_module
from ampwise.watch.module_hooks import Activations, DtypeFlow
from ampwise.watch.overhead import StepSkipper
from ampwise.watch.patches import FORK_LISTENERS, Patches
from ampwise.watch.run_events import OptimizerStep, RunEvent, ScalerStep, ScriptFailed
from ampwise.watch.script_source import findings_in_script
from ampwise.watch.step_replay import BadStepReplays, StepToReplay
from ampwise.watch.tied_weights import TiedWeights
from ampwise.watch.time_use import TimeUse
from ampwise.watch.timing import NOTHING, RunTiming
from ampwise.watch.tracker import CallTracker, TrackedOptimizer
from ampwise.watch.update_replay import KeptUpdate

__all__ = ["Watch"]

JUDGED_AGAIN = 1.25  # gradient health is judged at steps that grow by this factor, so that it costs less and less
FIRST_JUDGEMENT = 20
WRITTEN_EVERY = 2.0  # seconds between writes of findings while the script runs
FEW_OPTIMIZERS = 8  # up to this many are written as soon as they are known
SEARCHED_PASSES = 2  # first passes of a model, in which a model that contains it is searched for
ARMED_FOR = 3  # steps after a non-finite loss, in which activations are measured
UPDATES_EVERY = 10  # steps between checks of whether BF16 weights change
TIES_CHECKED_AT = (1, 8)  # steps of an optimizer
PROFILED = (6, 200)  # steps to profile
AROUND = 6  # lines of an excerpt before and after its line
MOST_FAILURES = 20


class Watch:
    """Watch everything a script does from ``install`` to ``remove``.

    record: where to write; None keeps the results in memory. every: count gradients in full at each n-th step; None: as
    often as one per cent of the time allows. activations: measure modules' outputs at every step. capsules: a folder to
    save bad steps in (they are replayed in any case); weights: save the model's weights with them; quiet: without a
    line on stderr.
    """

    installed: ClassVar[Watch | None] = None  # the one that is watching this process

    def __init__(
        self,
        record: RecordWriter | None = None,
        *,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        capsules: Path | None = None,
        weights: bool = True,
        quiet: bool = False,
    ) -> None:
        self.findings = Findings()
        self.events: list[LoggedEvent] = []  # of guards
        self.healths: dict[int, GradientHealth] = {}
        self.failures: list[str] = []  # errors of ampwise, which never reach the script
        self.steps = 0
        self.largest: dict[str, tuple[str, float]] = {}  # by module: dtype and largest magnitude
        self.time_use: TimeUse | None = None
        self._record = record
        self._always_measures, self._with_timing = activations, timing
        self._pid, self._began, self._folder = os.getpid(), time.time(), ""
        with contextlib.suppress(OSError):  # the folder was removed
            self._folder = os.getcwd()  # noqa: PTH109
        self._patches: Patches | None = None
        self._timing: RunTiming | None = None
        # What observes the script
        self._tracker = CallTracker(self.tell)
        self._skipper = StepSkipper(allowed=every is None and not activations)
        self._gradients = GradientReader(self.step_known, every)
        self._activations, self._flow = Activations(self._hook), DtypeFlow(self._hook)
        self._memory = OptimizerMemory()
        self._calls = ModelCalls()
        self._learned = Learning()
        self.learning = LearningWatch(self._learned, self._tracker)
        self.loop = LoopWatch(self._learned, self._tracker)
        self.ties, self.averages = TiedWeights(self._learned), HalfAverages(self._learned)
        paused = self._tracker.follows.paused
        self._bad_steps = BadStepReplays(
            self._calls, paused, self.failed, capsules=capsules, weights=weights, quiet=quiet
        )
        # Lists through which ampwise's own engines and guards report, and what to add to each.
        self._listeners: list[tuple[list[Any], Any]] = [
            (bad_steps.FINDING_LISTENERS, self.findings.add),
            (EVENT_LISTENERS, self.log),
            (bad_steps.REPLAY_CONTEXTS, paused),
        ]
        if capsules is not None:
            self._listeners.append((SHARED_CAPSULES, Capsules(capsules, weights=weights)))
        # Models and optimizers
        self._searched: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._described: dict[int, tuple[str, list[str]]] = {}  # by optimizer: its class, and its models' classes
        self._ran: set[tuple[int, int]] = set()  # (optimizer, step) that may have changed weights
        self._replayed: set[tuple[int, int]] = set()  # (optimizer, step) replayed before the step was made
        self._started_processes = False  # by the script; these are not watched
        self._armed = 0  # steps in which activations are still measured
        self._bad_module: str | None = None
        self._compared: dict[int, WeightComparison] = {}
        self._updates: list[tuple[int, int, WeightComparison]] = []  # optimizer, step
        # Judging and writing
        self._kinds: dict[str, int] = {}  # number of events by class
        self._not_measured: dict[str, None] = {}
        self._judge_at = FIRST_JUDGEMENT
        self._written = time.monotonic()
        self._early_written: object = None  # facts written to the record before the end
        self._early_written_at = -math.inf

    def _hook(self, on_call: Any) -> Hook:
        return Hook(on_call, self.failed, self._skipper)

    # On and off

    def install(self) -> Watch:
        """Start watching."""
        if self._patches is None:
            patches = self._patches = Patches()
            self._models = Models(patches, self, self._skipper)
            patches.wrap(BaseProcess, "start", self._process_starts)
            self._entry_points = EntryPoints(patches, self._tracker, self, self._skipper)
            self._bad_steps.draws.install(patches)
            if self._with_timing:
                self._timing = RunTiming(patches, profile_at=[step for step in PROFILED if step > self.steps])
            for optimizer, _ in self._tracker.optimizers.pairs():  # from an earlier installation
                self.optimizer_made(optimizer)
            for listeners, ours in self._listeners:
                listeners.append(ours)
            FORK_LISTENERS.add(self)
            Watch.installed = Watch.installed or self
        return self

    def remove(self) -> None:
        """Restore torch as it was."""
        if self._patches is None:
            return
        try:
            self.follow_again()
            if self._timing is not None:
                halves = [each.precision for each in self.healths.values() if each.precision != "fp32"]
                self.time_use = self._timing.use(halves[0] if halves else None)
        finally:
            if self._timing is not None:
                self._timing.abandon()
                self._timing = None
            self._remove_hooks()
            self._calls.forget()
            self._bad_steps.draws.forget()
            self._entry_points.remove()
            self._patches.undo()
            self._patches = None
            if Watch.installed is self:
                Watch.installed = None

    def _remove_hooks(self) -> None:
        for listeners, ours in self._listeners:
            listeners.remove(ours)
        self._activations.end()
        self._flow.remove()
        self._models.forget()

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
        self._remove_hooks()
        patches.undo()  # the optimizers' step hooks stay, as one may be running; they do nothing

    def adopt(self, things: Iterable[Any]) -> None:
        """Register models, optimizers and scalers that were made before."""
        every = list(things) if self._patches is not None else []
        for thing in every:
            if isinstance(thing, nn.Module | FunctionType):
                self._models.remember(thing)
        for thing in every:  # after the models
            if isinstance(thing, Optimizer):
                self.optimizer_made(thing)
            elif isinstance(thing, GradScaler):
                self._entry_points.wrap_scaler(type(thing))
                self._tracker.scaler_state(thing)

    @property
    def folder(self) -> Path | None:
        """Where the record is written."""
        return None if self._record is None else self._record.folder

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
            try:
                self._gradients.settle(wait=True)
                self._settle_others(wait=True)
            finally:
                self.remove()
            events = self._tracker.finish()
            if any(forward.precision == "bf16" and forward.device == "cuda" for forward in events.forwards):
                device = read_device(torch, 0)
                events.bf16_emulated_on = device.name if device.bf16_native is False else None
            self.learning.settle(wait=True)
            self._learned.ended = status == "finished"
            for evidence in (events, *self.healths.values(), self._learned_so_far(), self.time_use):
                if evidence is not None:
                    self.findings.judge_whole(evidence)
            if not self.steps and self._started_processes:
                for finding in findings_in_script():
                    self.findings.add(finding)
            add_diffs(self.seen(), self._folder, self._began)
        except Exception as problem:
            self.failed(problem)
        if self._record is not None:
            for name, value in self.facts().items():
                self._record.fact(name, value)
            self._record.findings(self.seen())
            self._record.close(status, exit_code, error)

    def died(self, error: BaseException) -> None:
        """Report an exception that ended the script."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if code_owner(each.filename) == "own"]
        site = CallSite(file=frames[-1].filename, line=frames[-1].lineno) if frames else CallSite()
        summary = exception_data(error)
        self.tell(ScriptFailed(site=site, error=summary["type"], message=summary["message"]), self._tracker.steps + 1)

    def failed(self, error: Exception) -> None:
        """Note an error of ampwise's own."""
        if len(self.failures) < MOST_FAILURES:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")  # noqa: PTH119
        if os.environ.get("AMPWISE_DEBUG"):
            raise error

    # Calls of models and compilers

    def model_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        begun = self._tracker.model_begins(model)
        if begun is None:
            return
        self.loop.model_begins(model, args, self._tracker.trained_by(model))
        event, states = begun
        passes = self._searched.get(model, 0)
        if states and passes < SEARCHED_PASSES:  # find a model around it whose ``parameters()`` was never called
            self._searched[model] = passes + 1
            whole = outermost_running_module()
            if whole is not None and whole is not model:
                self._models.watch(whole)  # from the next pass on
                for state in states:
                    self._tracker.trains(whole, state)
        self._calls.begins(model, args, kwargs, [state.index for state in states], event)

    def model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._tracker.model_ends(model):
            self._calls.ends(output)
            self.loop.model_ends(model)

    def backward_begins(self, frame: FrameType | None, loss: Tensor | None) -> KeptLoss | None:
        """Keep a loss, and the code that computed it."""
        return None if loss is None else self._calls.keep_loss(frame, loss)

    def backward_ended(self, kept: KeptLoss | None) -> None:
        """Explain a loss at once if it is known to be bad."""
        if kept is None:
            return
        # Within a step with a closure, the weights change before the step ends.
        stepping = [one for one, state in self._tracker.optimizers.pairs() if state.index in self._tracker.stepping]
        is_bad = kept.value.is_cpu and not math.isfinite(kept.value)
        if is_bad or not all(map(are_finite_on_host, stepping)):
            self.explain_now(kept, kept.value)

    def loss_read(self, frame: FrameType | None, loss: Tensor) -> None:
        """Explain a loss that is not finite and that the script reads: it may never get to a step."""
        kept = self._calls.keep_loss(frame, loss, ends=False)
        if kept is not None:
            self.explain_now(kept, kept.value)

    def gradients_unusable(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Explain gradients that the script drops, or that made a call fail, if they are not finite. Syncs."""
        fresh = [kept for kept in self._calls.losses if self._trains(kept, state) and self._calls.is_fresh(kept)]
        if fresh and not all(is_finite(each.grad) for each in parameters_of(optimizer) if each.grad is not None):
            losses = [each.loss for each in state.pending if each.loss is not None]
            self.explain_now(fresh[-1], sum(losses, torch.zeros(())) if losses else None)

    @staticmethod
    def _trains(kept: KeptLoss, state: TrackedOptimizer) -> bool:
        return state.index in kept.start.trains or not kept.start.trains

    def explain_now(self, kept: KeptLoss, loss: Tensor | None, *, raised: bool = False) -> None:
        """Replay a bad step while it is running. loss: scaled, if there is a scaler. raised: by anomaly detection."""
        if not self._calls.is_fresh(kept):
            return
        value = None if loss is None else float(loss.detach())
        pairs = self._tracker.optimizers.pairs()
        for optimizer, state in pairs:
            key = (state.index, state.steps + 1)
            if not self._trains(kept, state) or state.poisoned or key in self._replayed:
                continue
            self._replayed.add(key)
            scaler = state.scaler
            scale = None if scaler is None else float(scaler._scale)
            if value is not None and scale and state.scaled is not None:
                value /= scale
            with self._paused():
                self._explain(self._step_to_replay(optimizer, state, state.steps + 1, value, scale, raised=raised))
            return
        if not pairs:  # the script updates its weights by hand
            with self._paused():
                self._explain(StepToReplay(self._calls.backward_passes, value, None))

    def _process_starts(self, original: Any, process: Any) -> Any:
        self._started_processes = True
        return original(process)

    def before_compile(self) -> None:
        """Stop skipping steps before something is compiled, as changing hooks would recompile it."""
        self._skipper.allowed = False
        self.follow_again()
        self._flow.stop()

    def followed_step(self, optimizer: Optimizer, compiled: Any) -> Any:
        """Return an optimizer's compiled step, followed like any other."""
        return self._entry_points.followed_step(optimizer, compiled)

    # Skipped steps

    def step_over(self, optimizer: Any) -> None:
        """Start to skip steps if following is expensive, and no optimizer has pending gradients."""
        steps = self._skipper.step_followed()
        if not steps or self._armed or self._flow.on or self._gradients.pending or self._models.has_compiled:
            return
        if self._timing is not None and self._timing.measuring:
            return
        pairs = self._tracker.optimizers.pairs()
        if any(state.pending for state in self._tracker.optimizers.states()):
            return
        if any(each.device.type != "cpu" for one, _ in pairs for group in one.param_groups for each in group["params"]):
            return  # checking its loss would need a sync
        self._calls.forget()
        if self._timing is not None:
            self._timing.skips_steps(True)
        self._skipper.begin(unwrapped(optimizer), {id(each): state.index for each, state in pairs}, steps)

    def follow_again(self) -> None:
        """Skip no more steps for now."""
        if not self._skipper.on:
            return
        steps = self._skipper.end()
        self.steps += sum(steps.values())
        self._tracker.add_skipped_steps(steps)
        if self._timing is not None:
            self._timing.skips_steps(False)
        passed, self._skipper.last_call = self._skipper.last_call, None
        known = None if passed is None else self._tracker.last_pass_of(passed[0])
        if passed is not None and known is not None:
            self._calls.adopt(*passed, trains=known[1], event=known[0])
        if (backward := self._skipper.last_backward) is not None:
            frame, instruction, loss = backward
            self._calls.keep_loss(frame, loss, instruction=instruction)
            self._skipper.last_backward = None

    # Calls from the entry points

    def optimizer_made(self, optimizer: Any, site: CallSite | None = None) -> None:
        state = self._tracker.state_of(optimizer)
        if site is not None:
            state.made_at, state.first_lr = site, optimizer.param_groups[0].get("lr")
        self.learning.use_of(state)
        self.learning.holds(parameters_of(optimizer))
        self._watch_models_of(optimizer, state)
        self._models.forget_found()  # models may change before the first step

    def _watch_models_of(self, optimizer: Any, state: TrackedOptimizer) -> list[nn.Module]:
        models = self._models.of(optimizer)
        for model in models:
            for each in (model, self._models.around(model)):  # it may be the same
                self._models.watch(each)
                self._tracker.trains(each, state)
            if self._always_measures:
                self._activations.begin(model)
        return models

    def gradients_ready(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None) -> None:
        """Read the gradients of a step, which are complete, before they are unscaled, clipped or used."""
        state.stepped_by = scaler
        if state.read or is_ours(scaler) or is_capturing():
            return  # an engine reads them itself; a CUDA graph would repeat this at each replay
        by = None  # the scaler whose scale they are multiplied by
        if state.scaled is not None:
            known = state.scaler
            by = scaler if known is None else known
        elif scaler is not None and not state.pending and stage_of(scaler, optimizer) is not OptState.UNSCALED:
            by = scaler  # the optimizer was unknown during the backward pass: the scaler takes them for scaled
        with self._paused():
            self._gradients.ready(optimizer, None if by is None else by._scale, state)

    def step_begins(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Look at a step before weights change."""
        if is_capturing():
            return
        scaler, state.stepped_by = state.stepped_by, None
        if not is_ours(scaler):  # an engine examines its own steps
            with self._paused():
                self._look_before_update(optimizer, state, scaler)
            self._calls.updates[state.index] += 1
            with self._paused():
                self._names_of(optimizer, state)
                self.learning.step_begins(optimizer, state)
            self._note_norm(optimizer, state)
            state.update = None if state.plain or state.poisoned else KeptUpdate.before(optimizer)
            lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            state.lr = float(lr) if isinstance(lr, int | float) else None
        if state.steps % UPDATES_EVERY == 0:
            compared = copy_weights(optimizer, self._names_of(optimizer, state))
            if compared is not None:
                self._compared[state.index] = compared

    def _note_norm(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Note the norm of the weights, at each step on the CPU and once on a device."""
        weights = [each.detach() for each in parameters_of(optimizer) if not hasattr(each, "placements")]
        if not weights or state.poisoned or (state.first_norm is not None and not weights[0].is_cpu):
            return
        with torch.no_grad():
            norm = torch.stack([each.to(weights[0].device).float() for each in torch._foreach_norm(weights)]).norm()
        state.first_norm = norm if state.first_norm is None else state.first_norm
        if norm.is_cpu and norm.isfinite():
            state.norm = norm

    def _past_of(self, optimizer: Any, state: TrackedOptimizer) -> OptimizerPast:
        """Return what is known of an optimizer from before the step. Syncs."""
        self._note_norm(optimizer, state)
        changed = state.lr is not None and state.lr != state.first_lr
        set_at = (only_assignment_of("lr", state.made_at.file) if changed else None) or state.made_at
        first, now = (None if each is None else float(each) for each in (state.first_norm, state.norm))
        return OptimizerPast(made_at=set_at, first_norm=first, norm=now, lr=state.lr)

    def step_taken(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, *, ran: bool) -> None:
        """Process a step that has ended. ran: the optimizer's own step was called."""
        if is_capturing():
            self._not_measured["Steps in a CUDA graph: replays are not visible to the host."] = None
            return
        with self._paused():
            self.learning.step_over(state, ran=ran)
            if state.steps in TIES_CHECKED_AT:
                self.ties.check(self._names_of(optimizer, state), parameters_of(optimizer))
            self.averages.step_over(self.steps + 1, self.learning.is_held)
            self.loop.step_over(state)
            self._process_step(optimizer, state, scaler, ran=ran)
        if self._timing is not None and threading.current_thread() is threading.main_thread():
            self._timing.step_ended(self.steps)

    def scheduler_moved(self, scheduler: Any) -> None:
        moved = self._tracker.scheduled(scheduler)
        if moved is not None:
            state, event = moved
            step = state.steps

            def tell(skipped: bool) -> None:
                first = skipped and step == 1
                self.tell(replace(event, after_skip=skipped, before_any_update=first), step)

            self._gradients.when_known(state, tell)

    def _paused(self) -> AbstractContextManager[None]:
        """Return a context that leaves ampwise's own work out of the timing."""
        return NOTHING if self._timing is None else self._timing.paused()

    # Steps

    def _process_step(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, *, ran: bool) -> None:
        index, names, ours = state.index, self._names_of(optimizer, state), is_ours(scaler)
        update, state.update = state.update, None
        if update is not None and ran and update.is_bad:
            state.poisoned = self._bad_steps.explain_update(update, optimizer, state.steps + 1, self.findings.add)
        compared = self._compared.pop(index, None)
        if compared is not None and ran:
            compared.after_step()
            self._updates.append((index, state.steps + 1, compared))
        self._update_health(optimizer, state, scaler, names)
        self._activations.step_over()
        self._settle_others()  # before the step, whose judgement uses activations
        outcome = outcome_of(optimizer, scaler, ran=ran)
        self._calls.step_over(index, ran=ran)
        if ran:
            self._ran.add((index, state.steps + 1))
        self._gradients.step_ended(optimizer, state, names, outcome)
        if not ran and self._gradients.pending:
            self._gradients.settle(wait=True)  # the scaler has already synced, and skipped the step
        if ours:
            self._calls.ignored.add(index)  # the engine explains its steps itself
        if ours or not outcome.flags:
            self._calls.settled(index)
        self.steps += 1
        if self.steps >= self._judge_at:
            self._judge_at = int(self.steps * JUDGED_AGAIN) + 1
            for evidence in (*self.healths.values(), self._learned_so_far()):
                self.findings.judge_whole(evidence)
        self._write_progress()
        try:
            self._measure_models(optimizer, state, ran=ran)
        except Exception as error:  # it does not affect the step's count
            self.failed(error)
        self._models.forget_found()

    def _measure_models(self, optimizer: Any, state: TrackedOptimizer, *, ran: bool) -> None:
        """Begin or end what hooks measure in the next step, and count the memory of an optimizer once."""
        if self._armed and not self._always_measures:
            self._armed -= 1
            for model in self._models.of(optimizer) if self._armed else ():
                self._activations.begin(model)
            if not self._armed:
                self._activations.end()
        if ran:
            self._memory.take(state.index, unwrapped(optimizer), lambda: self._models.of(optimizer))
        profiled_soon = any(self.steps < step <= self.steps + len(self.healths) for step in PROFILED)
        self._flow.step_over(state.index, optimizer, self._models, free=not profiled_soon)

    def _names_of(self, optimizer: Any, state: TrackedOptimizer) -> list[str]:
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if len(state.names) != count or state.index not in self._described:  # a parameter group was added
            models = self._watch_models_of(optimizer, state)  # models may have been made since
            state.names = names_of(optimizer, models)
            self._described[state.index] = (state.name, [type(model).__name__ for model in models])
        return state.names

    def _update_health(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, names: list[str]) -> None:
        health = self.healths.get(state.index)
        if health is None:
            health = self.healths[state.index] = GradientHealth(state.index, names=names)
            for model in self._models.of(optimizer):
                dtypes = self._tracker.fsdp2_dtypes(model)
                if dtypes is not None and dtypes.reduce is not None:
                    health.reduced_in, health.ranks = dtype_name(dtypes.reduce), dtypes.ranks
        ran_in, kept = self._tracker.precisions_since_step(state), precisions_of(optimizer)
        for half in ("bf16", "fp16"):
            if half in ran_in or kept == (half,):
                health.precision = half
        if scaler is not None and scaler._enabled and health.growth_interval is None:
            health.growth_interval, health.backoff_factor = scaler._growth_interval, scaler._backoff_factor

    def _settle_others(self, *, wait: bool = False) -> None:
        """Read activation ranges and weight comparisons that have arrived."""
        for name, dtype, value in self._activations.arrived(wait=wait):
            bad = not math.isfinite(value)
            if bad and self._bad_module is None:
                self._bad_module = name
            known = self.largest.get(name, (dtype, 0.0))[1]
            self.largest[name] = (dtype, value if bad or value > known else known)
        while self._updates and (wait or self._updates[0][2].arrived):
            index, step, compared = self._updates.pop(0)
            if index in self.healths:
                self.healths[index].add_updates(step, compared.shares())

    def step_known(self, known: ReadStep) -> None:
        """Take the numbers of a step, once they are known."""
        row, index = known.row, known.row.optimizer
        health = self.healths.get(index)
        self._explain_if_bad(known)
        self._calls.settled(index)
        if health is None:
            return
        health.add_step(row)
        if known.sample is not None:
            health.add_sample(known.sample)
        if not known.finite and (known.bad or not row.finite):
            self._add_bad_step(health, known)
        if not row.skipped:  # the weights may have been updated with gradients that were not read
            # A scaler checks them.
            known.state.unread = row.norm is None and row.scale is None and not known.state.poisoned
        if self._record is not None:
            self._record.step(row)
            if known.sample is not None and row.step % self._record.sample_every(row.step) == 0:
                self._record.layers(known.sample)

    # Bad steps

    def _add_bad_step(self, health: GradientHealth, known: ReadStep) -> None:
        row, state = known.row, known.state
        healthy = None if state.unread else not state.poisoned
        if not row.skipped:
            state.poisoned = True  # non-finite gradients spoil all weights
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

    def _look_before_update(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None) -> None:
        """Replay a bad step before its update, while the weights are those it ran with."""
        if self._gradients.pending:
            self._settle_others()
            self._gradients.settle()
        if state.poisoned:
            return
        bad = self._gradients.bad_already(optimizer, state, scaled=scaler is not None)
        if bad is not None and (state.index, state.steps + 1) not in self._replayed:
            scale = None if scaler is None else float(scaler._scale)
            self._replayed.add((state.index, state.steps + 1))
            self._explain(self._step_to_replay(optimizer, state, state.steps + 1, bad[0], scale))
        if scaler is None:  # a scaler may still skip the step
            self._calls.settled(state.index, now=True)

    def _explain_if_bad(self, known: ReadStep) -> None:
        row, state, key = known.row, known.state, (known.row.optimizer, known.row.step)
        if key in self._ran and row.skipped:
            self._calls.updates[state.index] -= 2  # it changed nothing
        self._ran.discard(key)
        is_bad = row.skipped or not known.finite
        if not is_bad or state.poisoned or state.index in self._calls.ignored:
            return
        optimizers = [each for each, other in self._tracker.optimizers.pairs() if other is state]
        pasts = tuple(self._past_of(each, state) for each in optimizers)
        step = StepToReplay(row.step, row.loss, row.scale, tuple(optimizers), pasts)
        if key in self._replayed:
            self._replayed.discard(key)
        elif row.skipped:
            self._explain(step)
        else:
            self._bad_steps.came_too_late(step)

    def _step_to_replay(
        self,
        optimizer: Any,
        state: TrackedOptimizer,
        number: int,
        loss: float | None,
        scale: float | None,
        *,
        raised: bool = False,
    ) -> StepToReplay:
        inner = unwrapped(optimizer)
        return StepToReplay(number, loss, scale, (inner,), (self._past_of(inner, state),), raised=raised)

    def _explain(self, step: StepToReplay) -> None:
        for finding in self._bad_steps.explain(step):
            self.findings.add(finding, step.number)

    # Judging and writing

    def tell(self, event: RunEvent, step: int) -> None:
        kind = type(event).__name__
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if isinstance(event, ScalerStep | OptimizerStep) and event.backwards > 1:
            self._kinds["Accumulation"] = self._kinds.get("Accumulation", 0) + 1
        self.findings.judge(event, step)

    def log(self, event: LoggedEvent) -> None:
        self.events.append(event)
        if self._record is not None:
            self._record.event(event)

    def _learned_so_far(self) -> Learning:
        self._learned.steps = self._tracker.steps
        self.learning.update(self._flow.modules_of)
        self.loop.update()
        return self._learned

    def _write_progress(self) -> None:
        """Write findings, and precision and optimizers as soon as they are known, for readers of a running script."""
        if self._record is None:
            return
        now = time.monotonic()
        if self.findings.changed and now - self._written > WRITTEN_EVERY:
            self._written = now
            self.findings.changed = False
            self._record.findings(self.seen())
        known = (self._precision(), self._described)
        is_due = len(self._described) <= FEW_OPTIMIZERS or now - self._early_written_at >= WRITTEN_EVERY
        if known != self._early_written and is_due:  # each of many optimizers would write the whole list again
            self._early_written_at = now
            self._early_written = (known[0], dict(self._described))
            for name, value in self._early_facts().items():
                self._record.fact(name, value)

    def seen(self) -> list[CountedFinding]:
        """Return the findings so far, worst first, each with an excerpt of the source."""
        found = list(self.findings)
        known = any(is_cause(each.finding) for each in found)
        point_to_cause(found, known=known, after_model=self._bad_steps.after_model)
        for each in found:
            file, line = each.finding.place.file, each.finding.place.line
            if not each.excerpt and file is not None and line is not None:
                first = max(line - AROUND, 1)
                lines = linecache.getlines(file)[first - 1 : line + AROUND]
                each.excerpt = {"first_line": first, "lines": [text.rstrip("\n") for text in lines]}
        return found

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run other than findings."""
        return {
            "steps": self._tracker.steps,
            **self._early_facts(),
            "what_was_fine": list_passed_checks(self._tracker.run_events, self._kinds, self.seen(), self.healths),
            "not_measured": self.not_measured(),
            "timing": None if self.time_use is None else self.time_use.as_dict(),
            "settings": [
                {"name": name, "value": value, "reason": reason}
                for health in self.healths.values()
                for name, (value, reason) in suggested_settings(health).items()
            ],
            "dtype_flow": self._flow.rows(),
            "memory": self._memory.facts(),
            "activations": {name: {"dtype": dtype, "largest": value} for name, (dtype, value) in self.largest.items()},
        }

    def _early_facts(self) -> dict[str, Any]:
        """Return facts that are known after the first steps and seldom change: precision and optimizers."""
        optimizers = [
            {"index": index, "name": name, "model": " and ".join(models)}
            for index, (name, models) in sorted(self._described.items())
        ]
        return {"precision": self._precision(), "optimizers": optimizers}

    def _precision(self) -> str | None:
        for health in self.healths.values():
            return health.precision
        return None

    def not_measured(self) -> list[str]:
        """Return sentences on what was not measured, and why."""
        sentences = [*self._not_measured, *self._bad_steps.sentences]
        if self._tracker.follows.others:
            sentences.append("Several threads trained at the same time; only one of them was followed.")
        if self.failures:
            sentences.append(f"Some calls could not be followed: {self.failures[0]}")
        if not self._always_measures:
            sentences.append("Activations were not measured; use --activations.")
        if self._models.has_compiled_functions and not self.steps and self._calls.backward_passes:
            sentences.append(
                "No step of an optimizer was seen, perhaps because a compiled function takes them. Steps are followed "
                "if `optimizer.step` itself is compiled, or not at all."
            )
        sentences += [*self._gradients.not_measured(), *self._flow.not_measured(), *self._memory.not_measured()]
        return sentences if self.time_use is None else [*sentences, *self.time_use.not_measured]

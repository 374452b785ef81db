"""The watch over a script: torch's entry points → events and gradients → rules → findings, and a record of it all."""

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

from ampwise.evidence.conduct import Died, Event, OptimizerStep, ScalerStep, Site
from ampwise.evidence.health import BadStep, Health
from ampwise.evidence.settings import suggested_settings
from ampwise.evidence.timing import TimeUse
from ampwise.finding import Finding
from ampwise.record.rows import Seen, StepRow
from ampwise.record.writer import Writer, described
from ampwise.watch.activations import Activations, Ranges
from ampwise.watch.advice import is_cause, point_to_cause
from ampwise.watch.asking import on_host, precisions_of, stage_of, unwrapped
from ampwise.watch.bad_steps import BadSteps
from ampwise.watch.calls import Autocast, Calls, Passed
from ampwise.watch.engines import Engines
from ampwise.watch.entry_points import EntryPoints
from ampwise.watch.findings import Findings
from ampwise.watch.fine import what_was_fine
from ampwise.watch.fixes import add_diffs
from ampwise.watch.flow import Flow
from ampwise.watch.forks import follow_forks
from ampwise.watch.gradients import Gradients, Known
from ampwise.watch.memory import Memory
from ampwise.watch.models import Models, calling_here, names_of
from ampwise.watch.outcomes import is_ours, outcome_of
from ampwise.watch.patches import Patches
from ampwise.watch.replaying import BadOne
from ampwise.watch.rest import Rest
from ampwise.watch.state import OptimizerState
from ampwise.watch.timing import Timing
from ampwise.watch.tracker import Tracker
from ampwise.watch.updates import Compared, before_step

__all__ = ["Watch"]

JUDGED_AGAIN = 1.25  # gradient health is judged at steps that grow by this, so that it costs ever less
FIRST_JUDGEMENT = 20
WRITTEN_EVERY = 2.0  # seconds: findings, while the script runs
LOOKS_AROUND = 2  # passes of a model, in which is looked for what it is a part of
ARMED_FOR = 3  # steps after a loss that was not finite, in which modules are looked at
UPDATES_EVERY = 10  # steps: whether BF16 weights move
PROFILED = (6, 200)  # steps
AROUND = 6  # lines of an excerpt, on either side; readers show as many of them as they like


class Watch:
    """Everything the script does from ``install`` to ``remove`` is watched.

    record: where it is written to; None keeps it in memory. every: full counts of gradients at each n-th step; None as
    often as one per cent of the time allows. activations: look at what modules put out, at every step. capsules: a
    folder to save bad steps in, which are replayed in any case; weights: save those of the model, too.
    """

    def __init__(
        self,
        record: Writer | None = None,
        *,
        every: int | None = None,
        activations: bool = False,
        timing: bool = True,
        capsules: Path | None = None,
        weights: bool = True,
    ) -> None:
        self.findings = Findings()
        self.healths: dict[int, Health] = {}
        self.failures: list[str] = []  # of ours, which the script never learns of
        self.steps = 0
        self._record = record
        self._always_looks = activations
        self._with_timing = timing
        self._pid = os.getpid()
        self._began, self._folder = time.time(), _folder_here()
        self._tracker = Tracker(self._tell)
        self._rest = Rest(allowed=every is None and not activations)
        self._passed: tuple[Any, ...] | None = (
            None  # as in ``Passed``: the last call of a model, in steps that are passed over
        )
        self._passing: nn.Module | None = None  # while it runs
        self._gradients = Gradients(self._known, every)
        self._activations = Activations(self.failed)
        self._flow = Flow(self.failed)
        self._calls = Calls()
        self._bad_steps = BadSteps(self._calls, self._tracker.follows, self.failed, capsules=capsules, weights=weights)
        self._engines = Engines(self.explained, self._tracker.follows.paused, capsules, weights=weights)
        self._looked_around: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._stepped_by: dict[int, Any] = {}  # optimizers whose gradients are ready: the scaler, if there is one
        self._ran: set[tuple[int, int]] = set()  # steps, by optimizer, that may have changed weights
        self._replayed: set[tuple[int, int]] = set()  # steps, before they were taken
        self._memory = Memory()
        self._names: dict[int, list[str]] = {}
        self._described: dict[int, tuple[str, list[str]]] = {}  # optimizers: class, and the models' classes
        self._told_early: object = None  # what stands in the record of the run as a whole, before it ends
        self._armed = 0
        self._bad_module: str | None = None
        self._poisoned: set[int] = set()  # optimizers whose weights got gradients that were not finite
        self._unread: set[int] = set()  # those whose last gradients nobody has looked at
        self._ranges: list[tuple[int, Ranges]] = []
        self.largest: dict[str, tuple[str, float]] = {}  # by module: dtype and largest magnitude
        self._compared: dict[int, Compared] = {}
        self._updates: list[tuple[OptimizerState, int, Compared]] = []
        self._judge_at = FIRST_JUDGEMENT
        self._written = time.monotonic()
        self._kinds: dict[str, int] = {}  # events, for what was fine
        self._patches: Patches | None = None
        self._not_measured: dict[str, None] = {}
        self._timing: Timing | None = None
        self.time_use: TimeUse | None = None

    # On and off

    def install(self) -> Watch:
        """Begin to watch."""
        if self._patches is None:
            self._patches = Patches()
            self._models = Models(
                self._patches,
                self._model_begins,
                self._model_ends,
                self.failed,
                self._rest,
                (self._model_begins_at_rest, self._model_ends_at_rest),
                self._compiles,
            )
            self._entry_points = EntryPoints(self._patches, self._tracker, self, self._rest)
            to_come = [step for step in PROFILED if step > self.steps]
            self._timing = Timing(self._patches, profile_at=to_come) if self._with_timing else None
            for optimizer, _ in self._tracker.optimizers.pairs():  # of an earlier time
                self.optimizer_made(optimizer)
            self._engines.listen()
            follow_forks(self)
        return self

    def remove(self) -> None:
        """Leave torch as it was."""
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
        """In a forked child, which is not watched: the record is its parent's, and so is the training."""
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
        patches.undo()  # the optimizers' hooks stay, which one of them may be running through; they do nothing

    def adopt(self, things: Iterable[Any]) -> None:
        """Models, optimizers and scalers that were made before."""
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
        """Functions of torch's, and what stands in their places."""
        return [] if self._patches is None else self._patches.pairs()

    def __enter__(self) -> Watch:
        return self.install()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.died(error)
        self.close("finished" if error is None else "failed")

    def close(self, status: str = "finished", exit_code: int | None = None, error: BaseException | None = None) -> None:
        """The script is over: judge the whole, and write the record's end."""
        if os.getpid() != self._pid:  # a child that was forked: the record is its parent's
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
        """The script ended with an exception."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_own(each.filename)]
        site = Site(file=frames[-1].filename, line=frames[-1].lineno) if frames else Site()
        told = described(error)
        self._tell(Died(site=site, error=told["type"], message=told["message"]), self._tracker.steps + 1)

    # What entry points tell

    def _model_begins(self, model: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        begun = self._tracker.model_begins(model)
        if begun is not None:
            event, states = begun
            self._look_around(model, states)
            self._calls.begins(model, args, kwargs or {}, [state.index for state in states], event)

    def _look_around(self, model: nn.Module, states: Sequence[OptimizerState]) -> None:
        """In its first passes: is it part of a larger one, that nobody has asked for its parameters?"""
        if states and self._looked_around.get(model, 0) < LOOKS_AROUND:
            self._looked_around[model] = self._looked_around.get(model, 0) + 1
            whole = calling_here()
            if whole is not None and whole is not model:
                self._models.watch(whole)  # from the next pass on
                for state in states:
                    self._tracker.trains(whole, state)

    def _model_ends(self, model: nn.Module, args: Any = (), output: Any = None) -> None:
        if self._tracker.model_ends(model):
            self._calls.ends(output)

    # Steps that are passed over

    def step_over(self, optimizer: Any) -> None:
        """Whether to pass over some: only where none has gradients that wait, so that all begins anew afterwards."""
        steps = self._rest.step_followed()
        if not steps or not self._may_rest():
            return
        indices = {id(each): state.index for each, state in self._tracker.optimizers.pairs()}
        self._calls.forget()
        if self._timing is not None:
            self._timing.rests(True)
        self._rest.begin(unwrapped(optimizer), indices, steps)

    def _compiles(self) -> None:
        """Something is to be compiled, which must have nothing of ours in it that comes and goes."""
        self._rest.never_again()
        self.follow_again()
        self._flow.stop()

    def _may_rest(self) -> bool:
        states = self._tracker.optimizers.states()
        busy = self._armed or self._flow.on or self._gradients.waiting or any(state.pending for state in states)
        measuring = self._timing is not None and self._timing.measuring
        compiled = self._models.has_compiled_functions or self._models.has_compiled
        return not (busy or measuring or compiled) and all(
            on_host(each) for each, _ in self._tracker.optimizers.pairs()
        )

    def follow_again(self) -> None:
        if not self._rest.on:
            return
        steps = self._rest.end()
        self.steps += sum(steps.values())
        self._tracker.passed_over(steps)
        self._unread |= steps.keys() - self._poisoned  # nobody has looked at the gradients that they took
        if self._timing is not None:
            self._timing.rests(False)
        passed, self._passed, self._passing = self._passed, None, None
        known = None if passed is None else self._tracker.last_pass_of(passed[0])
        if passed is not None and known is not None:
            self._calls.take_up(Passed(*passed), known[1], known[0])

    def _model_begins_at_rest(self, model: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        """What a replay needs is kept, should the loss turn out not to be finite."""
        if not torch.is_grad_enabled():
            if self._rest.looks():
                self._model_begins(model, args, kwargs)
        elif self._passing is None and threading.get_ident() == self._rest.thread:
            autocast = Autocast.here("cpu") if torch.is_autocast_enabled("cpu") else None
            draws = type(model) in self._calls.draws_from_torch
            random = torch.default_generator.get_state() if draws else None
            self._passed, self._passing = (model, args, kwargs or {}, autocast, random), model

    def _model_ends_at_rest(self, model: nn.Module, args: Any = (), output: Any = None) -> None:
        if self._passing is model:
            self._passing = None
        else:
            self._model_ends(model, args, output)

    def optimizer_made(self, optimizer: Any) -> None:
        self._watch_models_of(optimizer)

    def _watch_models_of(self, optimizer: Any) -> list[nn.Module]:
        state = self._tracker.state_of(optimizer)
        models = self._models.of(optimizer)
        for model in models:
            for each in (model, self._models.around(model)):  # which may be the same
                self._models.watch(each)
                self._tracker.trains(each, state)
            if self._always_looks:
                self._activations.begin(model)
        return models

    def gradients_ready(self, optimizer: Any, scaler: Any | None) -> None:
        self._stepped_by[self._tracker.state_of(optimizer).index] = scaler
        if is_ours(scaler) or _capturing():
            return  # it reads them itself; or what is done now would be done at each replay of the graph
        state = self._tracker.state_of(optimizer)
        with self._paused():
            self._gradients.ready(optimizer, _scale_of(optimizer, state, scaler), state)

    def step_begins(self, optimizer: Any) -> None:
        if _capturing():
            return
        state = self._tracker.state_of(optimizer)
        scaler = self._stepped_by.pop(state.index, None)
        if not is_ours(scaler):  # an engine looks into its steps itself
            with self._paused():
                self._look_before_update(optimizer, state, scaler)
            self._calls.update_begins(state.index)
        if state.steps % UPDATES_EVERY == 0:
            compared = before_step(optimizer, self._names_of(optimizer, state))
            if compared is not None:
                self._compared[state.index] = compared

    def step_taken(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
        if _capturing():
            self._not_measured["Steps in a CUDA graph: the host is not told of its replays."] = None
            return
        with self._paused():
            self._take_in(optimizer, scaler, ran=ran)
        if self._timing is not None and threading.current_thread() is threading.main_thread():
            self._timing.step_ended(self.steps)

    def _paused(self) -> AbstractContextManager[None]:
        """What we do is no part of what the script's time goes to."""
        return nullcontext() if self._timing is None else self._timing.paused()

    def _take_in(self, optimizer: Any, scaler: Any | None, *, ran: bool) -> None:
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
        self._settle_others()  # before the step itself, which is judged by what modules put out
        outcome = outcome_of(optimizer, scaler, ran=ran)
        self._calls.step_over(state.index, ran=ran)
        self._ran |= {(state.index, state.steps + 1)} if ran else set()
        self._gradients.taken(optimizer, state, names, outcome)
        if not ran and self._gradients.waiting:
            self._gradients.settle(wait=True)  # the scaler has waited already, and has skipped it
        if is_ours(scaler):
            self._calls.leave(state.index)  # the engine explains its steps itself
        if not outcome.flags or is_ours(scaler):
            self._calls.settled(state.index)
        self._step_over(optimizer, state)
        self._look_early(optimizer, state, ran=ran)

    def scheduler_moved(self, scheduler: Any) -> None:
        moved = self._tracker.scheduled(scheduler)
        if moved is not None:
            state, event = moved
            step = state.steps
            self._gradients.when_known(state, lambda skipped: self._tell(replace(event, after_skip=skipped), step))

    def failed(self, error: Exception) -> None:
        """Ours, not the script's."""
        if len(self.failures) < 20:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")  # noqa: PTH119
        if os.environ.get("AMPWISE_DEBUG"):
            raise error

    # Steps

    def _step_over(self, optimizer: Any, state: OptimizerState) -> None:
        self.steps += 1
        if self._armed and not self._always_looks:
            self._armed -= 1
            for model in self._models.of(optimizer) if self._armed else ():
                self._activations.begin(model)
            if not self._armed:
                self._activations.end()
        if self.steps >= self._judge_at:
            self._judge_at = int(self.steps * JUDGED_AGAIN) + 1
            for health in self.healths.values():
                self.findings.judge_whole(health, "gradient")
        self._write_findings()
        self._write_early_facts()

    def _look_early(self, optimizer: Any, state: OptimizerState, *, ran: bool) -> None:
        """What is looked at once, in the first steps. If that fails, the step counts all the same."""
        try:
            if ran:
                self._memory.take(state.index, unwrapped(optimizer), lambda: self._models.of(optimizer))
            self._flow.step_over(state.index, optimizer, self._models, free=not self._profiled_soon())
        except Exception as error:
            self.failed(error)

    def _profiled_soon(self) -> bool:
        """Whether a profile is taken while each optimizer takes its next step."""
        return any(self.steps < step <= self.steps + len(self.healths) for step in PROFILED)

    def _settle_others(self, *, wait: bool = False) -> None:
        """What travels beside the facts of steps."""
        while self._ranges and (wait or self._ranges[0][1].posted.arrived):
            self._look_at(*self._ranges.pop(0))
        while self._updates and (wait or self._updates[0][2].arrived):
            state, step, compared = self._updates.pop(0)
            if state.index in self.healths:
                self.healths[state.index].add_updates(step, compared.shares())

    def _look_at(self, step: int, ranges: Ranges) -> None:
        for name, dtype, value in ranges.read():
            bad = not math.isfinite(value)
            if bad and self._bad_module is None:
                self._bad_module = name
            known = self.largest.get(name, (dtype, 0.0))[1]
            self.largest[name] = (dtype, value if bad or value > known else known)

    def _known(self, state: OptimizerState, known: Known) -> None:
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

    def _bad_step(self, health: Health, known: Known) -> None:
        row = known.row
        healthy = None if row.optimizer in self._unread else row.optimizer not in self._poisoned
        if not row.skipped:
            self._poisoned.add(row.optimizer)  # such gradients leave no weight as it was
        loss_is_bad = row.loss is not None and not math.isfinite(row.loss)
        if loss_is_bad and row.skipped and not self._activations.on and not self._armed and not self._bad_module:
            self._armed = ARMED_FOR + 1  # the weights are still what they were: look at modules in the steps to come
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
        """Whether the weights may have got gradients of which nobody knows; a scaler looks at them itself."""
        if not row.skipped:
            unknown = row.norm is None and row.scale is None and row.optimizer not in self._poisoned
            (self._unread.add if unknown else self._unread.discard)(row.optimizer)

    # Why a step was bad

    def _look_before_update(self, optimizer: Any, state: OptimizerState, scaler: Any | None) -> None:
        """The last moment at which the weights are those that a step ran with."""
        if self._gradients.waiting:
            self._settle_others()
            self._gradients.settle()
        if state.index in self._poisoned:
            return
        bad = self._gradients.bad_already(optimizer, state, scaled=scaler is not None)
        if bad is not None:
            scale = None if scaler is None else float(scaler._scale)
            self._replayed.add((state.index, state.steps + 1))
            self._explain(BadOne(state.steps + 1, bad[0], scale, (unwrapped(optimizer),)))
        if scaler is None:  # else it may still skip the step, and tell later
            self._calls.settled(state.index, now=True)

    def _explain_if_bad(self, state: OptimizerState, known: Known) -> None:
        row, key = known.row, (state.index, known.row.step)
        if key in self._ran and row.skipped:
            self._calls.was_skipped(state.index)
        self._ran.discard(key)
        is_bad = row.skipped or not known.finite
        if not is_bad or state.index in self._poisoned or self._calls.leaves(state.index):
            return
        optimizers = [each for each, other in self._tracker.optimizers.pairs() if other is state]
        step = BadOne(row.step, row.loss, row.scale, tuple(optimizers))
        if key in self._replayed:
            self._replayed.discard(key)
        elif row.skipped:
            self._explain(step)
        else:
            self._bad_steps.came_too_late(step)

    def _explain(self, step: BadOne) -> None:
        for finding in self._bad_steps.explain(step):
            self.explained(finding, step.number)

    def explained(self, finding: Finding, step: int | None = None) -> None:
        """What went bad, and why: by a replay of ours, or by whoever has replayed a step itself."""
        self.findings.add(finding, step)

    def _health_of(self, optimizer: Any, state: OptimizerState, scaler: Any | None) -> Health:
        health = self.healths.get(state.index)
        if health is None:
            health = self.healths[state.index] = Health(state.index, names=self._names_of(optimizer, state))
        ran_in, kept = self._tracker.precisions_since_step(state), precisions_of(optimizer)
        half = next((each for each in ("fp16", "bf16") if each in ran_in or kept == (each,)), None)
        health.precision = half or health.precision
        if scaler is not None and scaler._enabled and health.growth_interval is None:
            health.growth_interval, health.init_scale = scaler._growth_interval, scaler._init_scale
            health.growth_factor, health.backoff_factor = scaler._growth_factor, scaler._backoff_factor
        return health

    def _names_of(self, optimizer: Any, state: OptimizerState) -> list[str]:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._names.get(state.index)
        if known is None or len(known) != count:  # a group was added
            models = self._watch_models_of(optimizer)  # which may have been made since
            known = self._names[state.index] = names_of(optimizer, models)
            self._described[state.index] = (state.name, [type(model).__name__ for model in models])
        return known

    def _autocast(self) -> str | None:
        """What the training ran in, where that is a half format."""
        return next((each.precision for each in self.healths.values() if each.precision != "fp32"), None)

    # Judging and writing

    def _tell(self, event: Event, step: int) -> None:
        kind = type(event).__name__
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if isinstance(event, ScalerStep | OptimizerStep) and event.backwards > 1:
            self._kinds["Accumulation"] = self._kinds.get("Accumulation", 0) + 1
        self.findings.judge(event, step)

    def _judge_all(self) -> None:
        conduct = self._tracker.whole()
        conduct.bf16_emulated_on = _bf16_emulated_on(conduct.forwards)
        self.findings.judge_whole(conduct, "step")
        for health in self.healths.values():
            self.findings.judge_whole(health, "gradient")
        if self.time_use is not None:
            self.findings.judge_whole(self.time_use, "time")

    def _write_findings(self) -> None:
        now = time.monotonic()
        if self._record is not None and self.findings.changed and now - self._written > WRITTEN_EVERY:
            self._written = now
            self.findings.changed = False
            self._record.findings(self.seen())

    def _write_early_facts(self) -> None:
        """Whoever looks at the record before the end wants to know what it is that runs."""
        if self._record is None or self._told_early == (self._precision(), self._described):
            return
        self._told_early = (self._precision(), dict(self._described))
        for name, value in self._early_facts().items():
            self._record.fact(name, value)

    def seen(self) -> list[Seen]:
        """The findings so far, worst first, each with the lines around its place."""
        found = list(self.findings)
        known = any(is_cause(each.finding) for each in found)
        point_to_cause(found, known=known, after_model=self._bad_steps.after_model)
        for each in found:
            each.excerpt = each.excerpt or _excerpt(each.finding.place.file, each.finding.place.line)
        return found

    def facts(self) -> dict[str, Any]:
        """What there is to say besides findings."""
        settings = [each for health in self.healths.values() if (each := suggested_settings(health)) is not None]
        return {
            "steps": self._tracker.steps,
            **self._early_facts(),
            "what_was_fine": what_was_fine(self._tracker.conduct, self._kinds, self.seen(), self.healths),
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
        """What is known after the first steps, and seldom changes."""
        return {"precision": self._precision(), "optimizers": self._optimizers()}

    def _precision(self) -> str | None:
        return next((health.precision for health in self.healths.values()), None)

    def _optimizers(self) -> list[dict[str, Any]]:
        """Which they were, in words."""
        return [
            {"index": index, "name": name, "model": " and ".join(models)}
            for index, (name, models) in sorted(self._described.items())
        ]

    def not_measured(self) -> list[str]:
        """What was not, and why."""
        sentences = [*self._not_measured, *self._bad_steps.sentences]
        if self._tracker.follows.others:
            sentences.append("Several threads trained at a time; only one of them was followed.")
        if self.failures:
            sentences.append(f"Some calls could not be followed: {self.failures[0]}")
        if not self._always_looks:
            sentences.append("What modules put out was not looked at; --activations does.")
        sentences += [*self._flow.not_measured(), *self._memory.not_measured()]
        return sentences + list(getattr(self.time_use, "not_measured", ()))

    def _write_end(self, status: str, exit_code: int | None, error: BaseException | None) -> None:
        if self._record is not None:
            for name, value in self.facts().items():
                self._record.fact(name, value)
            self._record.findings(self.seen())
            self._record.close(status, exit_code, error)


def _scale_of(optimizer: Any, state: OptimizerState, scaler: Any | None) -> Any:
    """What gradients in memory are multiplied by."""
    if state.scaled is not None:
        known = state.scaler
        scaler = scaler if known is None else known
        return None if scaler is None else scaler._scale
    # An optimizer that was not known when the pass was made: a scaler that is asked to step it takes them for scaled.
    if scaler is None or state.pending or stage_of(scaler, optimizer) is OptState.UNSCALED:
        return None
    return scaler._scale


def _folder_here() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it has been removed
        return ""


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_own(file: str) -> bool:
    from ampwise.site import kind_of

    return kind_of(file) == "own"


def _bf16_emulated_on(forwards: Sequence[Any] | dict[Any, int]) -> str | None:
    if not any(forward.precision == "bf16" and forward.device == "cuda" for forward in forwards):
        return None
    from ampwise.hardware.torch_facts import read_device

    device = read_device(torch, 0)
    return device.name if device.bf16_native is False else None


def _excerpt(file: str | None, line: int | None) -> dict[str, Any]:
    if file is None or line is None:
        return {}
    lines = linecache.getlines(file)
    first = max(line - AROUND, 1)
    return {"first_line": first, "lines": [each.rstrip("\n") for each in lines[first - 1 : line + AROUND]]}

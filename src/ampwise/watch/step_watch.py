"""Follow a script's models, optimizers and steps through the calls that the entry points and hooks report."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.finding.call_site import CallSite
from ampwise.runs.writer import RecordWriter
from ampwise.watch.bad_step_watch import BadStepWatch
from ampwise.watch.cleaned_gradients import CleanedGradients
from ampwise.watch.findings import Findings
from ampwise.watch.frozen_parts import FrozenParts
from ampwise.watch.gradient_health import BadStep, GradientHealth
from ampwise.watch.gradients import GradientReader, ReadStep, WeightComparison, copy_weights, is_ours, outcome_of
from ampwise.watch.graph_lines import GraphLines
from ampwise.watch.half_averages import HalfAverages
from ampwise.watch.inspection import dtype_name, is_capturing, parameters_of, precisions_of, stage_of, unwrapped
from ampwise.watch.learning import Learning
from ampwise.watch.learning_watch import LearningWatch, is_due
from ampwise.watch.loop_watch import LoopWatch
from ampwise.watch.made_code import zeroed_at
from ampwise.watch.memory import OptimizerMemory
from ampwise.watch.model_calls import KeptLoss, ModelCalls
from ampwise.watch.models import Hook, Models, names_of, outermost_running_module
from ampwise.watch.module_hooks import Activations, DtypeFlow
from ampwise.watch.overhead import StepSkipper
from ampwise.watch.repeated_seeds import RepeatedSeeds
from ampwise.watch.replicas import ReplicaSums
from ampwise.watch.rivals import Rivals
from ampwise.watch.run_events import RunEvent
from ampwise.watch.sampled_values import is_plain
from ampwise.watch.saved_states import SavedStates
from ampwise.watch.stale_averages import StaleAverages
from ampwise.watch.tied_weights import TiedWeights
from ampwise.watch.timing import NOTHING, PROFILED, RunTiming
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker
from ampwise.watch.update_replay import KeptUpdate

__all__ = ["StepWatch"]

JUDGED_AGAIN = 1.25  # gradient health is judged at steps that grow by this factor, so that it costs less and less
FIRST_JUDGEMENT = 20
SEARCHED_PASSES = 2  # first passes of a model, in which a model that contains it is searched for
ARMED_FOR = 3  # steps after a non-finite loss, in which activations are measured
UPDATES_EVERY = 10  # steps between checks of whether BF16 weights change
TIES_CHECKED_AT = (1, 8)  # steps of an optimizer
LAST_ZEROS = 5  # samples until which lines are looked for, where only some are zero
FIRST_ZEROS = 2  # samples of gradients that are all zero, after which weights are looked at


class StepWatch:
    """Follow each step, from a model's call to the update, and judge what it shows. A ``Watch`` owns it.

    tell: takes an event and its step. on_step: called after each step. The other arguments are those of ``Watch``.
    """

    models: Models  # these two from the time the watch is installed
    timing: RunTiming | None = None

    def __init__(
        self,
        findings: Findings,
        record: RecordWriter | None,
        tell: Callable[[RunEvent, int], None],
        failed: Callable[[Exception], None],
        on_step: Callable[[], None],
        *,
        every: int | None = None,
        activations: bool = False,
        capsules: Path | None = None,
        weights: bool = True,
        quiet: bool = False,
    ) -> None:
        self.findings, self.record, self.failed, self._on_step = findings, record, failed, on_step
        self._tell = tell
        self.steps = 0
        self.healths: dict[int, GradientHealth] = {}
        self.largest: dict[str, tuple[str, float]] = {}  # by module: dtype and largest magnitude
        self.described: dict[int, tuple[str, list[str]]] = {}  # by optimizer: its class, and its models' classes
        self.not_measured: dict[str, None] = {}  # sentences
        self.always_measures = activations
        self.tracker = CallTracker(tell)
        self.skipper = StepSkipper(allowed=every is None and not activations)
        self.gradients = GradientReader(self.step_known, every)

        def hook(on_call: Any) -> Hook:
            return Hook(on_call, failed, self.skipper)

        self.activations, self.flow = Activations(hook), DtypeFlow(hook)
        self.memory = OptimizerMemory()
        self.calls, self._rivals = ModelCalls(), Rivals()
        self._learned = Learning()
        self.lines = GraphLines(lambda: not self.models.has_compiled)
        self.learning = LearningWatch(self._learned, self.tracker, self.lines)
        self.loop = LoopWatch(self._learned, self.tracker)
        self.cleaned = CleanedGradients(self._learned, self.tracker)
        self.frozen, self.stale = FrozenParts(self._learned), StaleAverages(self._learned)
        self.saved_states = SavedStates(self._learned, self.tracker, self.skipper)
        self.replicas, self.casts = ReplicaSums(), self.tracker.casts
        self.seeds = RepeatedSeeds(self._learned)
        self.ties, self.averages = TiedWeights(self._learned), HalfAverages(self._learned)
        self.bad_steps = BadStepWatch(
            *(self.calls, self.tracker, findings.add, self._paused, failed),
            capsules=capsules,
            weights=weights,
            quiet=quiet,
        )
        self._searched: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._armed = 0  # steps in which activations are still measured
        self._bad_module: str | None = None
        self._compared: dict[int, WeightComparison] = {}
        self._updates: list[tuple[int, int, WeightComparison]] = []  # optimizer, step
        self._judge_at = FIRST_JUDGEMENT

    def forget(self) -> None:
        """Remove all hooks, and drop what is kept of the running step."""
        self.lines.stop()
        self.activations.end()
        self.flow.remove()
        self.models.forget()
        self.calls.forget()
        self.bad_steps.draws.forget()

    def settle(self) -> None:
        """Wait for the numbers of all steps."""
        self.gradients.settle(wait=True)
        self._settle_others(wait=True)

    # Calls of models and compilers

    def model_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        begun = self.tracker.model_begins(model)
        if begun is None:
            return
        self.loop.model_begins(model, args, self.tracker.trained_by(model))
        if not torch.is_grad_enabled():
            self.seeds.evaluates()
        event, states = begun
        passes = self._searched.get(model, 0)
        if states and passes < SEARCHED_PASSES:  # find a model around it whose ``parameters()`` was never called
            self._searched[model] = passes + 1
            whole = outermost_running_module()
            if whole is not None and whole is not model:
                self.models.watch(whole)  # from the next pass on
                for state in states:
                    self.tracker.trains(whole, state)
        self.calls.begins(model, args, kwargs, [state.index for state in states], event)

    def model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.tracker.model_ends(model):
            self.calls.ends(output)
            self.loop.model_ends(model)

    def backward_begins(self, frame: FrameType | None, loss: Tensor | None) -> KeptLoss | None:
        """Keep a loss, and the code that computed it."""
        return None if loss is None else self.calls.keep_loss(frame, loss)

    def before_compile(self) -> None:
        """Stop skipping steps before something is compiled, as changing hooks would recompile it."""
        self.lines.stop()
        self.skipper.allowed = False
        self.follow_again()
        self.flow.stop()

    # Skipped steps

    def step_over(self, optimizer: Any) -> None:
        """Start to skip steps if following is expensive, and no optimizer has pending gradients."""
        steps = self.skipper.step_followed()
        if not steps or self._armed or self.flow.on or self.gradients.pending or self.models.has_compiled:
            return
        if self.timing is not None and self.timing.measuring:
            return
        pairs = self.tracker.optimizers.pairs()
        if any(state.pending for state in self.tracker.optimizers.states()):
            return
        if any(each.device.type != "cpu" for one, _ in pairs for group in one.param_groups for each in group["params"]):
            return  # checking its loss would need a sync
        self.calls.forget()
        self.loop.forget_region()
        if self.timing is not None:
            self.timing.skips_steps(True)
        self.skipper.begin(unwrapped(optimizer), {id(each): state.index for each, state in pairs}, steps)

    def follow_again(self) -> None:
        """Skip no more steps for now."""
        if not self.skipper.on:
            return
        steps = self.skipper.end()
        self.steps += sum(steps.values())
        self.tracker.add_skipped_steps(steps)
        if self.timing is not None:
            self.timing.skips_steps(False)
        passed, self.skipper.last_call = self.skipper.last_call, None
        known = None if passed is None else self.tracker.last_pass_of(passed[0])
        if passed is not None and known is not None:
            self.calls.adopt(*passed, trains=known[1], event=known[0])
        if (backward := self.skipper.last_backward) is not None:
            frame, instruction, loss = backward
            self.calls.keep_loss(frame, loss, instruction=instruction)
            self.skipper.last_backward = None

    # Calls from the entry points

    def optimizer_made(self, optimizer: Any, site: CallSite | None = None) -> None:
        state = self.tracker.state_of(optimizer)
        if site is not None:
            state.made_at, state.first_lr = site, optimizer.param_groups[0].get("lr")
        self.learning.use_of(state)
        self.learning.holds(parameters_of(optimizer))
        self.learning.training_changed()
        self._watch_models_of(optimizer, state)
        self.models.forget_found()  # models may change before the first step

    def _watch_models_of(self, optimizer: Any, state: TrackedOptimizer) -> list[nn.Module]:
        models = self.models.of(optimizer)
        for model in models:
            for each in (model, self.models.around(model)):  # it may be the same
                self.models.watch(each)
                self.tracker.trains(each, state)
            if self.always_measures:
                self.activations.begin(model)
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
            self.gradients.ready(optimizer, None if by is None else by._scale, state)

    def step_begins(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Look at a step before weights change."""
        if is_capturing():
            return
        self._rivals.step_begins(state.index, self.calls)
        scaler, state.stepped_by = state.stepped_by, None
        if not is_ours(scaler):  # an engine examines its own steps
            with self._paused():
                if self.gradients.pending:
                    self._settle_others()
                    self.gradients.settle()
                bad = (
                    None if state.poisoned else self.gradients.bad_already(optimizer, state, scaled=scaler is not None)
                )
                if bad is not None:
                    self.bad_steps.before_update(optimizer, state, scaler, *bad)
                if scaler is None and not state.poisoned:  # a scaler may still skip the step
                    self.calls.settled(state.index, now=True)
            self.calls.updates[state.index] += 1
            with self._paused():
                self._names_of(optimizer, state)
                self.learning.step_begins(optimizer, state)
                use = self.learning.use_of(state)
                if is_due(use.followed):
                    models = self.models.of(optimizer)
                    self.frozen.step_begins(use, state.names, parameters_of(optimizer), models)
                self.cleaned.step_begins(optimizer, state.steps + 1)
                self.replicas.step_begins(optimizer, state)
            self.bad_steps.note_norm(optimizer, state)
            state.update = None if state.plain or state.poisoned else KeptUpdate.before(optimizer)
            lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            state.lr = float(lr) if isinstance(lr, int | float) else None
        if state.steps % UPDATES_EVERY == 0:
            compared = copy_weights(optimizer, self._names_of(optimizer, state))
            if compared is not None:
                self._compared[state.index] = compared

    def step_taken(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, *, ran: bool) -> None:
        """Process a step that has ended. ran: the optimizer's own step was called."""
        if is_capturing():
            self.not_measured["Steps in a CUDA graph: replays are not visible to the host."] = None
            return
        with self._paused():
            self.learning.step_over(state, ran=ran)
            if state.steps in TIES_CHECKED_AT:
                self.ties.check(self._names_of(optimizer, state), parameters_of(optimizer))
            self.averages.step_over(self.steps + 1, self.learning.is_held)
            self.loop.step_over(state)
            self.seeds.step_over(self.steps + 1)
            self._process_step(optimizer, state, scaler, ran=ran)
        if self.timing is not None and threading.current_thread() is threading.main_thread():
            self.timing.step_ended(self.steps)

    def scheduler_moved(self, scheduler: Any) -> None:
        moved = self.tracker.scheduled(scheduler)
        if moved is not None:
            state, event = moved
            step = state.steps

            def tell(skipped: bool) -> None:
                first = skipped and step == 1
                self._tell(replace(event, after_skip=skipped, before_any_update=first), step)

            self.gradients.when_known(state, tell)

    def _paused(self) -> AbstractContextManager[None]:
        """Return a context that leaves ampwise's own work out of the timing."""
        return NOTHING if self.timing is None else self.timing.paused()

    # Steps

    def _process_step(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, *, ran: bool) -> None:
        index, names, ours = state.index, self._names_of(optimizer, state), is_ours(scaler)
        update, state.update = state.update, None
        if update is not None and ran and update.is_bad:
            state.poisoned = self.bad_steps.explain_update(update, optimizer, state.steps + 1)
        compared = self._compared.pop(index, None)
        if compared is not None and ran:
            compared.after_step()
            self._updates.append((index, state.steps + 1, compared))
        self._update_health(optimizer, state, scaler, names)
        self.activations.step_over()
        self._settle_others()  # before the step, whose judgement uses activations
        outcome = outcome_of(optimizer, scaler, ran=ran)
        self.bad_steps.step_over(state, ran=ran)
        self.gradients.step_ended(optimizer, state, names, outcome)
        if not ran and self.gradients.pending:
            self.gradients.settle(wait=True)  # the scaler has already synced, and skipped the step
        if ours:
            self.calls.ignored.add(index)  # the engine explains its steps itself
        if ours or not outcome.flags:
            self.calls.settled(index)
        self.steps += 1
        if self.steps >= self._judge_at:
            self._judge_at = int(self.steps * JUDGED_AGAIN) + 1
            for evidence in (*self.healths.values(), self.learned_so_far()):
                self.findings.judge_whole(evidence)
        self._on_step()
        try:
            self._measure_models(optimizer, state, ran=ran)
        except Exception as error:  # it does not affect the step's count
            self.failed(error)
        self.models.forget_found()

    def _measure_models(self, optimizer: Any, state: TrackedOptimizer, *, ran: bool) -> None:
        """Begin or end what hooks measure in the next step, and count the memory of an optimizer once."""
        if self._armed and not self.always_measures:
            self._armed -= 1
            for model in self.models.of(optimizer) if self._armed else ():
                self.activations.begin(model)
            if not self._armed:
                self.activations.end()
        if ran:
            self.memory.take(state.index, unwrapped(optimizer), lambda: self.models.of(optimizer))
        profiled_soon = any(self.steps < step <= self.steps + len(self.healths) for step in PROFILED)
        self.flow.step_over(state.index, optimizer, self.models, free=not profiled_soon)

    def _names_of(self, optimizer: Any, state: TrackedOptimizer) -> list[str]:
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if len(state.names) != count or state.index not in self.described:  # a parameter group was added
            models = self._watch_models_of(optimizer, state)  # models may have been made since
            state.names = names_of(optimizer, models)
            self.described[state.index] = (state.name, [type(model).__name__ for model in models])
        return state.names

    def _update_health(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, names: list[str]) -> None:
        health = self.healths.get(state.index)
        if health is None:
            health = self.healths[state.index] = GradientHealth(state.index, names=names)
            for name, each in zip(names, parameters_of(optimizer), strict=True):
                if (site := self.casts.site_of(each)) is not None:
                    health.cast_at[name] = site
            for model in self.models.of(optimizer):
                dtypes = self.tracker.fsdp2_dtypes(model)
                if dtypes is not None and dtypes.reduce is not None:
                    health.reduced_in, health.ranks = dtype_name(dtypes.reduce), dtypes.ranks
        ran_in, kept = self.tracker.precisions_since_step(state), precisions_of(optimizer)
        for half in ("bf16", "fp16"):
            if half in ran_in or kept == (half,):
                health.precision = half
        if scaler is not None and scaler._enabled and health.growth_interval is None:
            health.growth_interval, health.backoff_factor = scaler._growth_interval, scaler._backoff_factor

    def _settle_others(self, *, wait: bool = False) -> None:
        """Read activation ranges and weight comparisons that have arrived."""
        for name, dtype, value in self.activations.arrived(wait=wait):
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
        self.bad_steps.step_known(known)
        if health is None:
            return
        health.has_rivals = self._rivals.has_any(index)
        health.add_step(row)
        if known.sample is not None:
            health.add_sample(known.sample)
            if health.are_all_zero and health.zero_at is None:
                self.skipper.follow_next_steps()
                if health.samples == FIRST_ZEROS:
                    health.zeroed_at = self._zeroed_at(index)
                    health.frozen_zero = self._frozen_zero(index)
                self.learning.find_zeros(partial(setattr, health, "zero_at"))
            elif FIRST_ZEROS <= health.samples < LAST_ZEROS:
                self._find_lost(health, known.state)
        if not known.finite and (known.bad or not row.finite):
            self._add_bad_step(health, known)
        if not row.skipped:  # the weights may have been updated with gradients that were not read
            # A scaler checks them.
            known.state.unread = row.norm is None and row.scale is None and not known.state.poisoned
        if self.record is not None:
            self.record.step(row)
            if known.sample is not None and row.step % self.record.sample_every(row.step) == 0:
                self.record.layers(known.sample)

    def _find_lost(self, health: GradientHealth, state: TrackedOptimizer) -> None:
        """Ask where the gradient of the first dead parameter is lost."""
        first = next(iter(health.dead), None)
        for optimizer, other in self.tracker.optimizers.pairs() if first and first not in health.lost_at else ():
            parameters = parameters_of(optimizer)
            if other is state and len(state.names) == len(parameters) and first in state.names:
                self.skipper.follow_next_steps()
                lost_at = partial(health.lost_at.setdefault, first)
                self.learning.find_lost(parameters[state.names.index(first)], lost_at)

    def _zeroed_at(self, index: int) -> CallSite | None:
        """Return the line that fills weights of an optimizer with zeros, if it has several, and all are zero."""
        optimizer = next((each for each, state in self.tracker.optimizers.pairs() if state.index == index), None)
        trained = [] if optimizer is None else [each for each in parameters_of(optimizer) if each.requires_grad]
        every = [each for each in trained if each.dim() > 1]
        weights = {id(each) for each in every}
        if (
            optimizer is None
            or len(every) < 2
            or not all(map(is_plain, every))
            or any(bool(each.any()) for each in every)
        ):
            return None
        found: list[CallSite] = []
        for model in self.models.of(optimizer):
            parts = dict(model.named_modules())
            for path, module in parts.items():
                outer, _, part = path.rpartition(".")
                for name, each in module._parameters.items():
                    if id(each) in weights:
                        site = zeroed_at(type(module), name) or (part and zeroed_at(type(parts[outer]), part))
                        found += [site] if site else []
        return max(found, key=lambda site: site.line or 0, default=None)

    def _frozen_zero(self, index: int) -> tuple[str, CallSite] | None:
        """Return the name of a layer's weights that are frozen and all zero, and the statement that freezes them."""
        optimizer = next((each for each, state in self.tracker.optimizers.pairs() if state.index == index), None)
        for model in [] if optimizer is None else self.models.of(optimizer):
            for name, each in model.named_parameters():
                is_frozen = each.dim() > 1 and not each.requires_grad and is_plain(each)
                if is_frozen and not bool(each.any()) and (site := self.frozen.frozen_at(each)) is not None:
                    return name, site
        return None

    def _add_bad_step(self, health: GradientHealth, known: ReadStep) -> None:
        row, state = known.row, known.state
        healthy = None if state.unread else not state.poisoned
        first = 0.0 if state.first_norm is None else float(state.first_norm)
        if healthy and not math.isfinite(first):  # before the first step; infinite is also that of finite weights
            healthy = None if math.isinf(first) else False
        if not row.skipped:
            state.poisoned = True  # non-finite gradients spoil all weights
        loss_is_bad = row.loss is not None and not math.isfinite(row.loss)
        if loss_is_bad and row.skipped and not self.activations.on and not self._armed and not self._bad_module:
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

    # So far

    def learned_so_far(self) -> Learning:
        self._learned.steps = self.tracker.steps
        self.learning.update(self.flow.modules_of)
        self.loop.update()
        return self._learned

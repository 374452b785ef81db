"""Decide which bad steps are replayed, while the weights are still those they ran with; say why others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding import Finding
from ampwise.finding.call_site import CallSite
from ampwise.report.formatting import format_bytes
from ampwise.trace.capsule.saving import MAX_CAPSULES
from ampwise.trace.diagnosis import findings_about
from ampwise.trace.failure import Failure
from ampwise.trace.failure_facts import OptimizerFacts
from ampwise.trace.python_state import muted_output
from ampwise.trace.ranks import CollectiveInReplay
from ampwise.trace.replay import OptimizerPast, ReplayStep, is_finite
from ampwise.trace.value_ranges import local_shard
from ampwise.train.random_state import to_plain_random
from ampwise.watch.batch_draws import BatchDraws
from ampwise.watch.gradients import ReadStep, are_finite_on_host
from ampwise.watch.inspection import parameters_of, unwrapped
from ampwise.watch.loss_code import only_assignment_of
from ampwise.watch.model_calls import KeptLoss, ModelCall, ModelCalls
from ampwise.watch.outside_values import OutsideValues
from ampwise.watch.step_replay import StepToReplay, frame_of, replay_step
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker
from ampwise.watch.update_by_hand import UpdateByHand, WeightNorms
from ampwise.watch.update_replay import KeptUpdate
from ampwise.watch.watched_run import say_on_stderr

__all__ = ["BadStepWatch"]

APART = 1000  # steps after which another is replayed, however many there were
MOST_SENTENCES = 8  # they are similar


class BadStepWatch:
    """Explain bad steps at the first moment at which they are known to be bad.

    That is when the script reads the loss, after the backward pass, when gradients are dropped or refused, before the
    update, or when the numbers arrive from the device. add: takes a finding and its step. untimed: a context for work
    that the timing leaves out. capsules: a folder to save steps in; weights: the model's, too; quiet: without a line
    on stderr.
    """

    def __init__(
        self,
        calls: ModelCalls,
        tracker: CallTracker,
        add: Callable[[Finding, int], Any],
        untimed: Callable[[], AbstractContextManager[None]],
        failed: Callable[[Exception], None],
        *,
        capsules: Path | None = None,
        weights: bool = True,
        quiet: bool = False,
    ) -> None:
        self._calls, self._tracker, self._add, self._untimed, self._failed = calls, tracker, add, untimed, failed
        self._capsules, self._with_weights, self._quiet = capsules, weights, quiet
        self._saved = 0
        self._counts: Counter[bool] = Counter()
        self._last: dict[bool, int] = {}
        self._updated: set[tuple[int, int]] = set()  # (optimizer, step) that may have changed weights
        self._replayed: set[tuple[int, int]] = set()  # (optimizer, step) replayed before the step was made
        self._by_hand = False  # a step without an optimizer was explained
        self._update: UpdateByHand | None = None  # that may follow the last backward pass of a script without one
        self._norms = WeightNorms()  # of its weights
        self._explained: set[int] = set()  # optimizers with a step that was explained
        self.draws = BatchDraws()
        self._outside = OutsideValues()
        self.after_model = False  # a bad step was replayed, and its models are finite
        self.sentences: dict[str, None] = {}  # on steps that were not replayed; in order, each once

    # While the step is running

    def loss_read(self, frame: FrameType | None, loss: Tensor) -> None:
        """Explain a loss that is not finite and that the script reads: it may never get to a step."""
        kept = self._calls.keep_loss(frame, loss, ends=False)
        if kept is not None and (loss.grad_fn is not None or (kept.code is not None and kept.code.may_use_a_model)):
            self.explain_now(kept, kept.value)

    def backward_ended(self, kept: KeptLoss) -> None:
        """Explain a loss at once if it is known to be bad."""
        # Within a step with a closure, the weights change before the step ends.
        pairs = self._tracker.optimizers.pairs()
        gradients = [
            each.grad for one, state in pairs if state.index in self._tracker.stepping for each in parameters_of(one)
        ]
        if not pairs:  # the script updates its weights by hand
            gradients = [each.grad for model in kept.models() for each in model.parameters()]
        is_bad = kept.value.is_cpu and not is_finite(kept.value)
        if is_bad or not are_finite_on_host(gradients):
            self.explain_now(kept, kept.value)
        elif not pairs:
            self._keep_update(frame_of(kept), kept)

    def _keep_update(self, frame: FrameType | None, kept: KeptLoss, result: Any = None) -> None:
        """Keep what the script's own update, which may follow, begins with."""
        self._update = None
        if kept.value.is_cpu and not self._by_hand and kept.used_at is not None:
            number = self._calls.backward_passes
            self._update = UpdateByHand.after(frame, kept.used_at[1], kept.models(), number, result)
            if self._update is not None:
                self._norms.note(self._update.weights)

    def gradients_computed(self, frame: FrameType, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Explain gradients of parameters that the script has computed by ``autograd.grad``, if they are not finite."""
        if not are_finite_on_host(gradients):
            kept = self._calls.keep_loss(frame, loss)
            if kept is not None:
                self.explain_now(kept, kept.value)
        elif not self._tracker.optimizers.pairs() and not self._by_hand:
            kept = self._calls.keep_loss(frame, loss)
            if kept is not None:
                self._keep_update(frame_of(kept), kept, gradients)

    def gradients_unusable(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Explain gradients that the script drops or replaces, or that failed a call, if they are not finite. Syncs."""
        if (state.index, state.steps + 1) in self._replayed:
            return
        fresh = [kept for kept in self._calls.losses if _trains(kept, state) and self._calls.is_fresh(kept)]
        if fresh and not all(is_finite(each.grad) for each in parameters_of(optimizer) if each.grad is not None):
            losses = [each.loss for each in state.pending if each.loss is not None]
            self.explain_now(fresh[-1], sum(losses, torch.zeros(())) if losses else None)

    def any_gradients_unusable(self) -> None:
        for optimizer, state in self._tracker.optimizers.pairs():
            self.gradients_unusable(optimizer, state)

    def explain_now(self, kept: KeptLoss, loss: Tensor | None, *, raised: bool = False) -> None:
        """Replay a bad step while it is running. loss: scaled, if there is a scaler. raised: by anomaly detection."""
        if not self._calls.is_fresh(kept):
            return
        value = None if loss is None or loss.numel() != 1 else float(loss.detach())
        pairs = self._tracker.optimizers.pairs()
        for optimizer, state in pairs:
            if not _trains(kept, state) or state.poisoned or (state.index, state.steps + 1) in self._replayed:
                continue
            scale = None if state.scaler is None else float(state.scaler._scale)
            if value is not None and scale and state.scaled is not None:
                value /= scale
            self._explain_next(optimizer, state, value, scale, raised=raised)
            return
        if not pairs and not self._by_hand:  # later ones may come from weights that are spoiled
            self._by_hand = self._explain_own_update() or self._explain(
                StepToReplay(self._calls.backward_passes, value, None, by_hand=self._facts_by_hand())
            )

    def _explain_own_update(self) -> bool:
        """Replay the script's own update before a bad step. Return whether it is what spoiled the weights."""
        update = self._update
        return update is not None and self._explain_again(update.diagnose, update.number)

    def _facts_by_hand(self) -> OptimizerFacts | None:
        if self._update is None or not self._norms.facts(CallSite()).has_exploded:
            return None
        with self._tracker.follows.paused(), muted_output():
            return self._norms.facts(self._update.site())

    def before_update(self, optimizer: Any, state: TrackedOptimizer, scaler: Any | None, loss: float | None) -> None:
        """Replay a step that is known to be bad before its update."""
        if (state.index, state.steps + 1) not in self._replayed:
            self._explain_next(optimizer, state, loss, None if scaler is None else float(scaler._scale))

    def _explain_next(
        self, optimizer: Any, state: TrackedOptimizer, loss: float | None, scale: float | None, *, raised: bool = False
    ) -> None:
        """Replay the step that an optimizer has not made yet."""
        inner = unwrapped(optimizer)
        self._replayed.add((state.index, state.steps + 1))
        past = (self._past_of(inner, state),)
        self._explain(StepToReplay(state.steps + 1, loss, scale, (inner,), past, raised=raised))

    # After the step

    def step_over(self, state: TrackedOptimizer, *, ran: bool) -> None:
        """Note the end of a step. ran: weights may have changed."""
        self._calls.step_over(state.index, ran=ran)
        if ran:
            self._updated.add((state.index, state.steps + 1))

    def step_known(self, known: ReadStep) -> None:
        """Replay a step that has turned out to be bad, unless it has changed the weights."""
        row, state, key = known.row, known.state, (known.row.optimizer, known.row.step)
        if key in self._updated and row.skipped:
            self._calls.updates[state.index] -= 2  # it changed nothing
        self._updated.discard(key)
        is_bad = row.skipped or not known.finite
        if is_bad and not state.poisoned and state.index not in self._calls.ignored:
            optimizers = [each for each, other in self._tracker.optimizers.pairs() if other is state]
            pasts = tuple(self._past_of(each, state) for each in optimizers)
            step = StepToReplay(row.step, row.loss, row.scale, tuple(optimizers), pasts)
            if key in self._replayed:
                self._replayed.discard(key)
            elif row.skipped:
                self._explain(step)
            elif self._is_due(step):
                why = "it was not skipped, and the weights had changed by the time it was known to be bad"
                self._add_sentence(f"Step {step.number} could not be replayed: {why}.")
        self._calls.settled(state.index)

    def explain_update(self, update: KeptUpdate, optimizer: Any, number: int) -> bool:
        """Replay an update that has spoiled the weights. Return whether it needs no further look."""
        return self._explain_again(lambda: update.diagnose(optimizer, number), number)

    def _explain_again(self, diagnosed: Callable[[], Failure | None], number: int) -> bool:
        """Replay an update. Return whether it needs no further look."""
        try:
            with self._tracker.follows.paused(), muted_output():
                failure = diagnosed()
        except CollectiveInReplay:
            why = "it exchanges values with other ranks; theirs may not have been finite"
            self._add_sentence(f"The update of step {number} could not be replayed: {why}.")
            return True
        except Exception as error:  # the optimizer's own
            self._add_sentence(f"The update of step {number} could not be replayed: {type(error).__name__}: {error}.")
            return False
        found = [] if failure is None or failure.not_reproduced else findings_about(failure)
        for finding in found:
            self._add(finding, number)
        return bool(found)

    # The optimizer before the step

    def note_norm(self, optimizer: Any, state: TrackedOptimizer) -> None:
        """Note the norm of the weights, of which this rank may have shards: on the CPU at each step, else once."""
        weights = [local_shard(each.detach()) for each in parameters_of(optimizer)]
        if not weights or state.poisoned or (state.first_norm is not None and not weights[0].is_cpu):
            return
        with torch.no_grad():
            norms = torch._foreach_norm([each.double() if each.is_cpu else each for each in weights])
            norm = torch.stack([each.to(weights[0].device).double() for each in norms]).norm()
        state.first_norm = norm if state.first_norm is None else state.first_norm
        if norm.is_cpu and norm.isfinite():
            state.norm = norm

    def _past_of(self, optimizer: Any, state: TrackedOptimizer) -> OptimizerPast:
        """Return what is known of an optimizer from before the step. Syncs."""
        self.note_norm(optimizer, state)
        changed = state.lr is not None and state.lr != state.first_lr
        first_lr = optimizer.param_groups[0].get("initial_lr", state.first_lr) if optimizer.param_groups else None
        set_at = None
        if changed and state.scheduled_at is not None and isinstance(first_lr, int | float):
            set_at = state.scheduled_at if state.lr is not None and state.lr > first_lr else None
        elif changed:
            set_at = only_assignment_of("lr", state.made_at.file)
        first, now = (None if each is None else float(each) for each in (state.first_norm, state.norm))
        return OptimizerPast(state.made_at, lr_set_at=set_at or state.made_at, first_norm=first, norm=now, lr=state.lr)

    # Replays

    def _explain(self, step: StepToReplay) -> bool:
        """Replay a step and add the findings. Return whether there are any."""
        if not self._is_due(step):
            return False
        fresh = [call for call in self._calls if self._calls.is_fresh(call)]
        losses = [loss for loss in self._calls.losses if self._calls.is_fresh(loss)]
        if not fresh and not losses:
            if len(self._calls):
                why = "the weights had changed by the time it was known to be bad"
            elif self._calls.too_large:
                why = f"the model's input ({self._calls.too_large / 2**20:.0f} MiB) was too large to keep"
            else:
                why = (
                    "no call of a model was seen; the step is compiled as a whole, or the model is not called as a "
                    "module"
                )
            if not step.may_be_ordinary:
                self._add_sentence(f"Step {step.number} could not be replayed: {why}.")
            return False
        if self._is_explained(fresh, step):
            return True
        try:
            scalers = tuple(scaler for scaler, _ in self._tracker.scalers.pairs() if scaler.is_enabled())
            step = replace(step, draws=self.draws, outside=self._outside, usual=self._calls.usual, scalers=scalers)
            with self._untimed(), self._tracker.follows.paused():
                result = replay_step(fresh, losses, step)
        except Exception as error:  # perhaps the model's own
            self._failed(error)
            what = ": ".join(each for each in (type(error).__name__, str(error).rstrip(".")) if each)
            self._add_sentence(f"Step {step.number} could not be replayed: running the model again failed with {what}.")
            return False
        self.after_model |= result.after_model
        if result.why_not:
            self._add_sentence(result.why_not)
        call, findings = result.call or (fresh[-1] if fresh else None), result.findings
        if call is not None and (findings or not step.may_be_ordinary):
            findings = self._save(call, step, findings)
        for finding in findings:
            self._add(finding, step.number)
        if findings:
            self._explained.update(
                state.index for one, state in self._tracker.optimizers.pairs() if one in step.optimizers
            )
        return bool(findings)

    def _is_explained(self, calls: Sequence[ModelCall], step: StepToReplay) -> bool:
        """Return whether it is bad because of weights that the explained step of another optimizer has spoiled."""
        others = [
            one
            for one, state in self._tracker.optimizers.pairs()
            if state.index in self._explained and one not in step.optimizers
        ]
        used = {id(each) for call in calls for each in call.model.parameters()} if others else set()
        weights = [each for one in others for each in parameters_of(one) if id(each) in used]
        return bool(weights) and not all(map(is_finite, weights))

    def _is_due(self, step: StepToReplay) -> bool:
        """Return whether to replay the step: the 1st, 2nd, 4th ... Those a loss scale may explain count separately."""
        kind = step.may_be_ordinary
        self._counts[kind] += 1
        due = self._counts[kind].bit_count() == 1 or step.number - self._last.get(kind, 0) >= APART
        if due:
            self._last[kind] = step.number
        return due

    def _add_sentence(self, sentence: str) -> None:
        if len(self.sentences) < MOST_SENTENCES:
            self.sentences[" ".join(sentence.split())] = None

    def _save(self, call: ModelCall, step: StepToReplay, findings: list[Finding]) -> list[Finding]:
        """Save the step if requested, and return the findings with the path of the capsule."""
        if self._capsules is None or self._saved >= MAX_CAPSULES:
            return findings
        self._saved += 1
        from ampwise.trace.capsule import CapsuleContents, size_of, write

        model = ReplayStep(run=lambda _: None, device=call.device, models=[call.model])
        contents = CapsuleContents(
            args=call.args,
            kwargs=call.kwargs,
            random=to_plain_random(call.random),
            weights=model.parameters(),
            buffers=model.buffers(),
            precision=call.precision,
            scale=step.scale or 1.0,
            step=step.number,
            loss=step.loss,
            findings=findings,
            device=call.device.type,
        )
        try:
            how_large = format_bytes(size_of(contents, self._with_weights))
            if not self._quiet:
                say_on_stderr("ampwise: saving step {} in {} ({})", step.number, self._capsules, how_large)
            path = write(self._capsules, contents, weights=self._with_weights)
        except BadInput as error:
            self._add_sentence(f"Step {step.number} could not be saved: {error}")
            return findings
        return [finding.but(evidence={**finding.evidence, "capsule": str(path)}) for finding in findings]


def _trains(kept: KeptLoss, state: TrackedOptimizer) -> bool:
    return state.index in kept.start.trains or not kept.start.trains

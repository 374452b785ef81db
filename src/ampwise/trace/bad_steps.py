"""Explain bad steps by running them again: a step's inputs are kept until it is known to be good.

On a GPU it is known only a little later whether a step was skipped, at the latest before the next update; until then
the weights are still those of the bad step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor

from ampwise.finding import Finding
from ampwise.finding.terminal import log_line
from ampwise.trace.capsule.saving import MAX_CAPSULES, SHARED_CAPSULES, Capsules, checked_capsules
from ampwise.trace.kept_batch import KeptBatch, iterator_read_by, original_batches
from ampwise.trace.rank_group import RankGroup
from ampwise.trace.refuse_collectives import collectives_refused
from ampwise.trace.replay import ReplaySettings, ReplayStep, is_compiled
from ampwise.train.buffer_snapshot import BufferSnapshot
from ampwise.train.callback import Callback, MicroBatch
from ampwise.train.engine import Engine
from ampwise.train.random_state import HostRandomUse
from ampwise.train.scaler.loss_scale import MAX_FORGIVEN
from ampwise.train.scaler.step_result import StepResult
from ampwise.train.step import Step

__all__ = ["FINDING_LISTENERS", "REPLAY_CONTEXTS", "BadStepExplainer", "BadStepRecord"]

KEPT_BYTES = 256 * 2**20  # of batches kept by reference within a window, the last always included
PROBES = 16  # replays of steps that look like ordinary gradient overflows, plus
STEPS_PER_PROBE = 100  # one more for each this many steps

LOWER_SCALES_MAY_HELP = ("gradient-overflow", "not-reproduced")

# Called with each finding and its step, instead of printing to stderr: set by ``ampwise watch``. And contexts for
# replays, so that a watch does not count them as the script's own work.
FINDING_LISTENERS: list[Callable[[Finding, int], None]] = []
REPLAY_CONTEXTS: list[Callable[[], AbstractContextManager[Any]]] = []


@dataclass(slots=True)
class PendingStep:
    """A closed step of which it is not known yet whether it was bad."""

    step: Step
    outcome: StepResult
    passes: list[KeptBatch]  # empty for a step by backward() and apply(), which cannot be run again
    modes: list[bool]  # ``training`` of all modules


@dataclass(slots=True)
class BadStepRecord:
    """A step whose loss or gradients are not finite."""

    number: int
    precision: str
    loss: float
    scale: float
    passes: list[KeptBatch]
    modes: list[bool]
    remarks: tuple[str, ...] = ()
    outcome: StepResult | None = None  # None for a step that is not closed yet


class BadStepExplainer(Callback):
    """Keeps the last step until it is known to be good, and explains bad steps by replaying them."""

    def __init__(self, capsules: Capsules | str | os.PathLike[str] | None = None) -> None:
        self.findings: list[Finding] = []
        self.last: list[Finding] = []  # about the step explained last
        self.capsules = checked_capsules(capsules)
        self._later_capsules: Capsules | None = None  # for bad steps that come in a row: see save_to
        self._save_from = 1
        self._to_save = 0  # steps replayed because they were to be saved there
        self._streak = 0  # bad steps in a row that a lower loss scale would not have fixed
        self._draws = HostRandomUse()
        self._passes: list[KeptBatch] = []
        self._awaited: PendingStep | None = None
        self._failed = 0  # steps that a lower loss scale would not have fixed
        self._probed = 0  # steps that look like ordinary gradient overflows
        self._forgiven = 0  # backoffs undone since the last applied step
        self._said_why_not = False
        self._looked_into = False  # the current step is already explained
        self._mutates = False  # a loss function has changed its batch in place

    def save_to(self, capsules: Capsules | None, *, streak: int = 1) -> None:
        """Save bad steps here, from the ``streak``-th in a row on; None: no longer. ``Engine(capsules=...)`` wins.

        The explainer counts the streak itself: on a GPU, others learn of a bad step when the next is already explained.
        """
        self._later_capsules, self._save_from = capsules, streak

    # Hooks

    def on_attach(self, engine: Engine) -> None:
        self._engine = ref(engine)  # weak, as the engine owns this object
        self._models, self._optimizers = engine.models, engine.optimizers
        self._ranks, self._statistics, self._device = engine.ranks, engine.buffer_snapshot, engine.device
        self._now = BufferSnapshot(self._models, self._statistics)
        self._modules = list(dict.fromkeys(module for model in self._models for module in model.modules()))

    def on_pass_begin(self, batch: MicroBatch) -> None:
        """Keep a micro-batch before it runs."""
        kept = KeptBatch(batch, self._draws.begin(self._device))
        if self._mutates:
            kept.copy_batch()
        self._passes.append(kept)
        while len(self._passes) > 1 and sum(each.bytes for each in self._passes) > KEPT_BYTES:
            self._passes.pop(0)

    def on_pass_end(self, batch: MicroBatch, loss: Tensor) -> None:
        kept = self._passes[-1]
        kept.share = loss
        self._draws.end(kept.random)

    def on_step_dropped(self) -> None:
        self._passes = []

    def on_reset(self) -> None:
        """Forget the last step, whose weights no longer exist."""
        self._awaited, self._passes, self.last = None, [], []
        self._failed = self._probed = self._streak = 0  # later failures count from zero

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Explain the previous step now if it was bad: its weights are still in place.

        Explain this one too, if its loss can be read without a sync and is not finite: its gradients may be finite.
        """
        self.settle()
        readable = loss is not None and loss.device.type == "cpu" and not self._ranks.several
        self._looked_into = readable and not math.isfinite(loss or 0.0)
        if self._looked_into:
            assert loss is not None
            engine = self._attached
            scale = engine.scaler.get_scale() if self._device.type == "cpu" else 1.0
            self._explain(BadStepRecord(number, engine.precision, float(loss), scale, self._passes, self._modes()))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Explain the closed step if it was bad: now if that is known, else before the next update."""
        self._mutates = self._mutates or any(kept.is_changed for kept in self._passes)
        if not self._looked_into:
            self._awaited = PendingStep(step.bare(), result, self._passes, self._modes())
        self._passes, self._looked_into = [], False
        if result.is_skip_known:
            self.settle()

    def settle(self) -> None:
        """Explain the last step if it was bad. Syncs if it is not finished."""
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        step, skipped = awaited.step, awaited.outcome.skipped
        if not skipped:
            self._forgiven = 0
        # All ranks agree on a skip, but each has its own loss: they explain a step together or not at all.
        if not skipped and (self._ranks.several or math.isfinite(step.loss)):
            self._streak = 0
        else:
            scale = awaited.outcome.scale_before
            moved = () if skipped else ("Its gradients were finite, so the weights have changed by one step since.",)
            kept = awaited.passes, awaited.modes
            self._explain(BadStepRecord(step.number, step.precision, step.loss, scale, *kept, moved, awaited.outcome))

    @property
    def _attached(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "the engine is gone"
        return engine

    def _explain(self, bad: BadStepRecord) -> None:
        try:
            self._look_into(bad)
        except Exception as error:  # from ampwise, or from the script in the replay; training continues
            what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
            if self._ranks.speaks:
                log_line("ampwise: step {} could not be explained: its replay failed with {}", bad.number, what)

    # Explaining a bad step

    def _look_into(self, bad: BadStepRecord) -> None:
        together = RankGroup(self._ranks.process_group, several=self._ranks.several, in_step=self._ranks.in_step)
        losses_were_finite = all(together.all_of(math.isfinite(bad.loss)))
        if not losses_were_finite:  # no loss scale would have fixed that
            self._undo_backoff_of(bad)
        scaler = self._attached.scaler
        settling = losses_were_finite and scaler.is_enabled() and bad.scale > scaler.min_scale
        self._streak += not settling
        is_to_save = not settling and self._later_capsules is not None and self._streak == self._save_from
        if not bad.passes:
            self._say_in_pieces(bad)
            return
        from ampwise.trace.diagnosis import diagnose, findings_about

        if not self._is_looked_into(bad, losses_were_finite, is_to_save):
            return
        if drawn := next(filter(None, together.all_of(iterator_read_by(bad.passes))), ""):
            self._say_drawn(bad, drawn)
            return
        with ExitStack() as stack:
            alone = nullcontext() if together.several else collectives_refused()
            contexts = (self._as_it_began(bad), original_batches(bad.passes), self._ranks.bypass_ddp(), alone)
            for context in (*(around() for around in REPLAY_CONTEXTS), *contexts):
                stack.enter_context(context)
            kept = self._guilty(bad, together)
            subject = self._subject(bad, kept)
            failure = diagnose(subject, together)
            if failure is None:
                return
            if losses_were_finite and failure.kind not in LOWER_SCALES_MAY_HELP:
                self._undo_backoff_of(bad)
            found = findings_about(failure)
            # Saved by the rank where it arose, and reported by the first.
            later = self._later_capsules if self._streak >= self._save_from else None
            capsules = self.capsules or later or next(iter(SHARED_CAPSULES), None)
            path = None
            if capsules is not None and failure.rank == together.rank:
                path = capsules.save(subject, bad, kept, self._attached.policy.as_dict(), found)
            build = None if capsules is None else capsules.build
            found = _saved_at(next(filter(None, together.all_of(str(path or ""))), ""), build, found)
        if not together.several or together.rank == 0:
            self._tell(found, bad.number)

    def _is_looked_into(self, bad: BadStepRecord, loss_was_fine: bool, is_to_save: bool) -> bool:
        """Limit replays, so that a run with many bad steps stays fast: only the 1st, 2nd, 4th, 8th … is replayed.

        A step that is to be saved is, too: a replay is what finds the batch to save.
        """
        if is_to_save and self._to_save < MAX_CAPSULES:  # not the number saved, which differs between ranks
            self._to_save += 1
            return True
        if loss_was_fine and bad.scale > 1:  # may be an ordinary overflow
            self._probed += 1
            return self._probed <= PROBES + bad.number // STEPS_PER_PROBE
        self._failed += 1
        return self._failed & (self._failed - 1) == 0

    def _undo_backoff_of(self, bad: BadStepRecord) -> None:
        """Undo the scale backoff on all ranks or on none, and at most MAX_FORGIVEN times in a row."""
        together = self._ranks.alone or self._ranks.several
        if bad.outcome is not None and together and self._forgiven < MAX_FORGIVEN:
            self._forgiven += 1
            self._attached.undo_backoff(bad.outcome)

    def _subject(self, bad: BadStepRecord, kept: KeptBatch) -> ReplayStep:
        from ampwise.trace.call_arguments import named_tensors

        return ReplayStep(
            run=self._running(kept),
            device=self._device,
            models=self._models,
            optimizers=self._optimizers,
            batch=named_tensors(kept.batch.function, kept.batch.args, kept.batch.kwargs),
            precision=bad.precision,
            scale=bad.scale,
            random=kept.random,
            loss=None if kept.share is None else float(kept.share),
            step=bad.number,
            remarks=(*bad.remarks, *self._remarks(kept)),
            function=kept.batch.function,
        )

    def _running(self, kept: KeptBatch) -> Callable[[ReplaySettings], Tensor]:
        engine = self._attached
        return lambda settings: engine.rerun(kept.batch, scale=settings.scale, goes_back=settings.goes_back_from)

    def _guilty(self, bad: BadStepRecord, together: RankGroup) -> KeptBatch:
        """Return the first micro-batch whose loss is not finite; else the first whose gradients are not."""
        passes = bad.passes[-min(together.all_of(len(bad.passes))) :]
        flags = together.all_of([kept.share is not None and not math.isfinite(kept.share) for kept in passes])
        bad_losses: list[KeptBatch] = [kept for kept, *on_ranks in zip(passes, *flags, strict=True) if any(on_ranks)]
        if bad_losses:
            return bad_losses[0]
        return passes[-1] if len(passes) == 1 else self._with_bad_gradients(passes, bad.scale, together)

    def _with_bad_gradients(self, passes: Sequence[KeptBatch], scale: float, together: RankGroup) -> KeptBatch:
        from ampwise.trace.replay import Replay

        for kept in passes:
            subject = ReplayStep(
                run=self._running(kept),
                device=self._device,
                models=self._models,
                random=kept.random,
                function=kept.batch.function,
            )
            with Replay(subject) as replay:
                if not together.all_hold(lambda replay=replay: replay.plain(ReplaySettings(scale=scale)).finite):  # type: ignore[misc]
                    return kept
        return passes[-1]

    def _remarks(self, kept: KeptBatch) -> Iterator[str]:
        if kept.is_changed and not kept.copies:
            yield (
                "The loss function changed its batch in place, and the replay ran on the changed batch: values "
                "reported as inputs may have been produced by the step. From now on a copy of the batch is kept."
            )
        if any(map(is_compiled, (*self._models, kept.batch.function))):
            yield "Code compiled by torch.compile was replayed uncompiled."

    @contextmanager
    def _as_it_began(self, bad: BadStepRecord) -> Iterator[None]:
        """Restore training modes, running statistics and other buffers of the bad step; undo that afterwards."""
        modes = self._modes()
        self._set_modes(bad.modes)  # first: statistics of layers in evaluation mode are not backed up
        self._now.remember()
        self._statistics.restore()
        try:
            yield
        finally:
            self._now.restore()
            self._set_modes(modes)

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training

    def _say_drawn(self, bad: BadStepRecord, drawn: str) -> None:
        self._say_once(
            bad,
            f"It was not replayed: the loss function reads from `{drawn}`, and a replay would advance it. Pass the "
            "batch as an argument: engine.step(loss_fn, x, y).",
        )

    def _say_in_pieces(self, bad: BadStepRecord) -> None:
        self._say_once(
            bad,
            "To see which operation it came from, use a step that can be replayed: engine.step(loss_fn, x, y), or "
            "ampwise.trace(loss_fn, x, y).",
        )

    def _say_once(self, bad: BadStepRecord, why: str) -> None:
        """Print once why a step with a bad loss is not explained."""
        if not self._said_why_not and not math.isfinite(bad.loss) and self._ranks.speaks:
            self._said_why_not = True
            log_line("ampwise: the loss of step {} is {}. {}", bad.number, bad.loss, why)

    def _tell(self, found: Sequence[Finding], step: int) -> None:
        known = {(finding.rule.code, finding.place.file, finding.place.line) for finding in self.findings}
        new = [each for each in found if (each.rule.code, each.place.file, each.place.line) not in known]
        self.findings += new
        self.last = list(found)
        for listener in FINDING_LISTENERS:
            for finding in found:
                listener(finding, step)
        if new and not FINDING_LISTENERS:
            from ampwise.report.printers import log_findings

            log_findings(new)


def _saved_at(path: str, build: str | None, found: Sequence[Finding]) -> list[Finding]:
    """Add the capsule's path and build function, if there are any, to the findings' evidence."""
    where = {"capsule": path, **({} if build is None else {"build": build})} if path else {}
    return [each.but(evidence={**each.evidence, **where}) for each in found]

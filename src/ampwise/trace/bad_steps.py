"""Explain bad steps by running them again: a step's inputs are kept until it is known to be good.

On a GPU it is known only a little later whether a step was skipped, at the latest before the next update; until then
the weights are still those of the bad step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ampwise.finding import Finding
from ampwise.finding.log import log
from ampwise.trace.call_arguments import iterator_names, named_tensors
from ampwise.trace.capsule.saving import MAX_CAPSULES, SHARED_CAPSULES, Capsules
from ampwise.trace.ranks import RankGroup, collectives_refused
from ampwise.trace.recorder import overwrite
from ampwise.trace.replay import Replay, ReplaySettings, ReplayStep, is_compiled
from ampwise.trace.value_ranges import bytes_of
from ampwise.train.buffer_snapshot import BufferSnapshot
from ampwise.train.callback import Callback, MicroBatch
from ampwise.train.engine import Engine
from ampwise.train.random_state import HostRandomUse
from ampwise.train.scaler.loss_scale import MAX_FORGIVEN
from ampwise.train.scaler.step_result import StepResult
from ampwise.train.step import Step

__all__ = ["FINDING_LISTENERS", "REPLAY_CONTEXTS", "BadStepExplainer", "BadStepRecord", "KeptBatch"]

GOOD_BYTES = 64 * 2**20  # of a batch of the last good step
KEPT_BYTES = 256 * 2**20  # of batches kept by reference within a window, the last always included
PROBES = 16  # replays of steps that look like ordinary gradient overflows, plus
STEPS_PER_PROBE = 100  # one more for each this many steps

LOWER_SCALES_MAY_HELP = ("gradient-overflow", "not-reproduced")

# Called with each finding and its step, instead of printing to stderr: set by ``ampwise watch``. And contexts for
# replays, so that a watch does not count them as the script's own work.
FINDING_LISTENERS: list[Callable[[Finding, int], None]] = []
REPLAY_CONTEXTS: list[Callable[[], AbstractContextManager[Any]]] = []


@dataclass(slots=True)
class KeptBatch:
    """A micro-batch by reference, kept until its step is known to be good, and the random state when it began."""

    batch: MicroBatch
    random: dict[str, Any]
    share: Tensor | None = None  # contribution to the step's loss, once it is computed
    versions: list[tuple[Tensor, int]] = field(init=False)  # the batch's tensors, with their version counters
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the batch, if the loss function changes it

    def __post_init__(self) -> None:
        self.versions = []
        for each in (*self.batch.args, *self.batch.kwargs.values()):
            # Plain tensors skip torch's pytree, which would dominate the cost here.
            for tensor in (each,) if isinstance(each, Tensor) else tree_leaves(each):
                if isinstance(tensor, Tensor) and not tensor.is_inference():
                    self.versions.append((tensor, tensor._version))

    @property
    def bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor, _ in self.versions)

    @property
    def is_changed(self) -> bool:
        """Whether the batch was written to since."""
        for tensor, version in self.versions:  # noqa: SIM110 (a generator would cost more, at each step)
            if tensor._version != version:
                return True
        return False


@dataclass(slots=True)
class BadStepRecord:
    """A step whose loss or gradients are not finite."""

    number: int
    precision: str
    loss: float
    scale: float
    passes: list[KeptBatch]  # empty for a step by backward() and apply(), which cannot be run again
    modes: list[bool]  # ``training`` of all modules
    remarks: tuple[str, ...] = ()
    outcome: StepResult | None = None  # None for a step that is not closed yet


class BadStepExplainer(Callback):
    """Keeps the last step until it is known to be good, and explains bad steps by replaying them."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.last: list[Finding] = []  # about the step explained last
        self._later_capsules: Capsules | None = None  # for bad steps that come in a row: see save_to
        self._save_from = 1
        self._to_save = 0  # steps replayed because they were to be saved there
        self._streak = 0  # bad steps in a row that a lower loss scale would not have fixed
        self._draws = HostRandomUse()
        self._passes: list[KeptBatch] = []
        # A closed step of which it is not known yet whether it was bad, its passes, and the modes of all modules (None:
        # they have not changed since).
        self._awaited: tuple[Step, StepResult, list[KeptBatch], list[bool] | None] | None = None
        self._failed = 0  # steps that a lower loss scale would not have fixed
        self._probed = 0  # steps that look like ordinary gradient overflows
        self._forgiven = 0  # backoffs undone since the last applied step
        self._updated = False  # a step has changed the weights
        self._said_why_not = False
        self._looked_into = False  # the current step is already explained
        self._good: KeptBatch | None = None  # of the last step that was good, to try fixes on
        self._mutates = False  # a loss function has changed its batch in place

    def save_to(self, capsules: Capsules | None, *, streak: int = 1) -> None:
        """Save bad steps here, from the ``streak``-th in a row on; None: no longer.

        ``Capsules`` among the engine's callbacks win.

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
            kept.copies = [(tensor, tensor.detach().clone()) for tensor, _ in kept.versions]
        self._passes.append(kept)
        while len(self._passes) > 1 and sum(each.bytes for each in self._passes) > KEPT_BYTES:
            self._passes.pop(0)

    def on_pass_end(self, batch: MicroBatch, loss: Tensor) -> None:
        kept = self._passes[-1]
        kept.share = loss
        if "python" in kept.random:
            self._draws.end(kept.random)

    def on_step_dropped(self) -> None:
        self._passes = []

    def on_reset(self) -> None:
        """Forget the last step, whose weights no longer exist."""
        self._awaited, self._passes, self._good, self.last = None, [], None, []
        self._failed = self._probed = self._streak = 0  # later failures count from zero

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Explain the previous step now if it was bad: its weights are still in place.

        Explain this one too, if its loss can be read without a sync and is not finite: its gradients may be finite.
        """
        if self._awaited is not None:
            self.settle()
        self._looked_into = False
        several = self._ranks.distributed and self._ranks.several
        if loss is not None and loss.is_cpu and not several and not math.isfinite(loss):
            self._looked_into = True
            engine = self._attached
            scale = engine.scaler.get_scale() if self._device.type == "cpu" else 1.0
            self._explain(BadStepRecord(number, engine.precision, float(loss), scale, self._passes, self._modes()))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Explain the closed step if it was bad: now if that is known, else before the next update."""
        for kept in self._passes:
            self._mutates = self._mutates or kept.is_changed
        is_known = result.is_read
        if not self._looked_into:
            kept_step = step if step.extra is None else step.bare()  # ``extra`` may be large
            self._awaited = kept_step, result, self._passes, None if is_known else self._modes()
        self._passes, self._looked_into = [], False
        if is_known:
            self.settle()

    def settle(self) -> None:
        """Explain the last step if it was bad. Syncs if it is not finished."""
        if self._awaited is None:
            return
        (step, outcome, passes, modes), self._awaited = self._awaited, None
        # All ranks agree on a skip, but each has its own loss: they explain a step together or not at all.
        several = self._ranks.distributed and self._ranks.several
        loss, skipped = step.loss, step.skipped
        if not skipped:
            self._forgiven, self._updated = 0, True
            if several or math.isfinite(loss):
                self._streak = 0
                self._good = passes[-1] if passes and not several and passes[-1].bytes <= GOOD_BYTES else None
                return
        moved = () if skipped else ("Its gradients were finite, so the weights have changed by one step since.",)
        modes, scale = self._modes() if modes is None else modes, outcome.scale_before
        self._explain(BadStepRecord(step.number, step.precision, step.loss, scale, passes, modes, moved, outcome))

    @property
    def _attached(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "the engine is gone"
        return engine

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    # Explaining a bad step

    def _explain(self, bad: BadStepRecord) -> None:
        try:
            self._look_into(bad)
        except Exception as error:  # from ampwise, or from the script in the replay; training continues
            what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
            if self._ranks.speaks:
                log("warning", "step {} could not be explained: its replay failed with {}", bad.number, what)

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
            self._say_why_not(
                bad,
                "To see which operation it came from, use a step that can be replayed: engine.step(loss_fn, x, y), or "
                "ampwise.trace(loss_fn, x, y).",
            )
            return
        if not self._is_looked_into(bad, losses_were_finite, is_to_save):
            return
        calls = [kept.batch for kept in bad.passes]
        iterators = (name for call in calls for name in iterator_names(call.function, call.args, call.kwargs))
        if drawn := next(filter(None, together.all_of(next(iterators, ""))), ""):
            self._say_why_not(
                bad,
                f"It was not replayed: the loss function reads from `{drawn}`, and a replay would advance it. Pass the "
                "batch as an argument: engine.step(loss_fn, x, y).",
            )
            return
        found = self._replayed(bad, together, losses_were_finite)
        if found is not None and (not together.several or together.rank == 0):
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

    def _replayed(self, bad: BadStepRecord, together: RankGroup, losses_were_finite: bool) -> list[Finding] | None:
        """Replay the step, save it if that is wanted, and return the findings; None if only the loss scale failed."""
        from ampwise.trace.diagnosis import diagnose, findings_about
        from ampwise.trace.sample_draws import with_origin_in_loader
        from ampwise.trace.update_probe import failing_update

        with ExitStack() as stack:
            alone = nullcontext() if together.several else collectives_refused()
            contexts = (self._as_it_began(bad), self._ranks.bypass_ddp(), alone)
            for context in (*(around() for around in REPLAY_CONTEXTS), *contexts):
                stack.enter_context(context)
            kept = self._guilty(bad, together)
            subject = self._subject(bad, kept)
            failure = diagnose(subject, together)
            if failure is None:
                return None
            if failure.kind == "bad-weights" and not together.several:
                updates = (failing_update(each, bad.number - 1) for each in self._optimizers)
                failure = next(filter(None, updates), failure)
            if losses_were_finite and failure.kind not in LOWER_SCALES_MAY_HELP:
                self._undo_backoff_of(bad)
            found = findings_about(failure if together.several else with_origin_in_loader(failure, subject.batch))
            # Saved by the rank where it arose, and reported by the first.
            later = self._later_capsules if self._streak >= self._save_from else None
            own = (each for each in self._attached.callbacks if isinstance(each, Capsules))
            capsules = next(own, None) or later or next(iter(SHARED_CAPSULES), None)
            path = None
            if capsules is not None and failure.rank == together.rank:
                path = capsules.save(subject, bad, kept, self._attached.policy.as_dict(), found)
            saved_at = next(filter(None, together.all_of(str(path or ""))), "")
        if not saved_at:
            return found
        where = {"capsule": saved_at}
        if capsules is not None and capsules.make is not None:
            where["build"] = capsules.make
        return [each.but(evidence={**each.evidence, **where}) for each in found]

    def _guilty(self, bad: BadStepRecord, together: RankGroup) -> KeptBatch:
        """Return the first micro-batch whose loss is not finite; else the first whose gradients are not."""
        passes = bad.passes[-min(together.all_of(len(bad.passes))) :]
        flags = together.all_of([kept.share is not None and not math.isfinite(kept.share) for kept in passes])
        for kept, on_ranks in zip(passes, zip(*flags, strict=True), strict=True):
            if any(on_ranks):
                return kept
        for kept in passes[:-1]:
            with Replay(self._subject(bad, kept)) as replay:
                if not together.all_hold(lambda replay=replay: replay.plain(ReplaySettings(scale=bad.scale)).finite):  # type: ignore[misc]
                    return kept
        return passes[-1]

    def _subject(self, bad: BadStepRecord, kept: KeptBatch) -> ReplayStep:
        engine, batch, remarks = self._attached, kept.batch, bad.remarks
        if kept.is_changed and not kept.copies:
            remarks += (
                "The loss function changed its batch in place, and the replay ran on the changed batch: values "
                "reported as inputs may have been produced by the step. From now on a copy of the batch is kept.",
            )
        compiled = any(map(is_compiled, (*self._models, batch.function)))
        if compiled:
            remarks += ("Code compiled by torch.compile was replayed uncompiled.",)
        good = self._good if self._good is None or not self._good.is_changed else None
        return ReplayStep(
            run=lambda settings: engine.rerun(batch, scale=settings.scale, goes_back=settings.goes_back_from),
            device=self._device,
            models=self._models,
            optimizers=self._optimizers,
            batch=named_tensors(batch.function, batch.args, batch.kwargs),
            precision=bad.precision,
            scale=bad.scale,
            random=kept.random,
            loss=None if kept.share is None else float(kept.share),
            step=bad.number,
            untrained=not self._updated,
            compiled=compiled,
            remarks=remarks,
            touched=(batch.function,),
            usual=None
            if good is None
            else lambda settings: engine.rerun(good.batch, scale=1.0, goes_back=lambda _: False),
        )

    @contextmanager
    def _as_it_began(self, bad: BadStepRecord) -> Iterator[None]:
        """Restore training modes, buffers and changed batches of the bad step; undo that afterwards."""
        modes = self._modes()
        self._set_modes(bad.modes)  # first: statistics of layers in evaluation mode are not backed up
        self._now.remember()
        self._statistics.restore()
        copies = [pair for kept in bad.passes for pair in kept.copies]
        changed = [(tensor, tensor.detach().clone()) for tensor, _ in copies]
        for tensor, values in copies:
            overwrite(tensor, values)
        try:
            yield
        finally:
            for tensor, values in changed:
                overwrite(tensor, values)
            self._now.restore()
            self._set_modes(modes)

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training

    # Reporting

    def _say_why_not(self, bad: BadStepRecord, why: str) -> None:
        """Log once why a step with a bad loss is not explained."""
        if not self._said_why_not and not math.isfinite(bad.loss) and self._ranks.speaks:
            self._said_why_not = True
            log("warning", "the loss of step {} is {}. {}", bad.number, bad.loss, why)

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

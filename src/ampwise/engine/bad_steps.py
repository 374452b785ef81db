"""Steps that went bad: what it takes to run them again is kept until it is known, and then they are explained.

Whether a step was skipped is known on a GPU only a little later, at the latest before the next update: until then the
weights are those that it failed with.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.engine.capsules import FOR_ALL, Capsules
from ampwise.engine.passes import Pass, as_given, drawn_from
from ampwise.engine.ranks import Ranks
from ampwise.engine.scaling.outcome import Outcome
from ampwise.engine.scaling.scale import FORGIVEN
from ampwise.engine.statistics import Statistics
from ampwise.engine.step import Step
from ampwise.finding import Finding
from ampwise.printers.terminal import say
from ampwise.randomness import HostDraws
from ampwise.trace.alone import exchanges_refused
from ampwise.trace.replay import Settings, Subject, is_compiled
from ampwise.trace.together import Together

__all__ = ["AROUND", "LISTENERS", "Bad", "BadSteps"]

KEPT_BYTES = 256 * 2**20  # of batches, besides the last: those of a window are kept by reference
PROBES = 16  # replays of steps that seem to have overflowed in the ordinary way, and then
PROBED_EVERY = 100  # one more for each so many steps

LOWER_SCALES_MAY_HELP = ("gradient-overflow", "not-reproduced")

# Who is told of findings, with the step, instead of stderr: a watch over the script. And what is to be around a replay,
# which is not the script's doing.
LISTENERS: list[Callable[[Finding, int], None]] = []
AROUND: list[Callable[[], AbstractContextManager[Any]]] = []


@dataclass(slots=True)
class Awaited:
    """A step, until it is known how it went."""

    step: Step
    outcome: Outcome
    passes: list[Pass]  # none of a step that was done in pieces, by backward() and apply(): it cannot be run again
    modes: list[bool]  # training or evaluation, of all modules


@dataclass(slots=True)
class Bad:
    """A step that went bad."""

    number: int
    precision: str
    loss: float
    scale: float
    passes: list[Pass]
    modes: list[bool]
    remarks: tuple[str, ...] = ()
    outcome: Outcome | None = None  # None of a step that is not closed yet


Rerun = Callable[[Pass, Settings], Tensor]


class BadSteps:
    """What is kept of the last step, and what was found of those that failed."""

    def __init__(
        self,
        rerun: Rerun,
        undo_backoff: Callable[[Outcome], None],
        models: Sequence[Module],
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
        statistics: Statistics,
        device: torch.device,
        policy: Mapping[str, Any],
        capsules: Capsules | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self.last: list[Finding] = []  # of the step that was explained last
        self.capsules = capsules
        # Methods of the engine, which has this.
        self._rerun, self._undo_backoff = WeakMethod(rerun), WeakMethod(undo_backoff)
        self._models, self._optimizers = models, optimizers
        self._ranks, self._statistics, self._device = ranks, statistics, device
        self._now = Statistics(models, statistics)
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._draws = HostDraws()
        self._passes: list[Pass] = []
        self._awaited: Awaited | None = None
        self._policy = policy
        self._failed = 0  # steps whose loss was bad
        self._probed = 0
        self._forgiven = 0  # since the last step that was applied
        self._said_why_not = False
        self._looked_into = False  # the step at hand
        self._mutates = False  # a loss function has changed its batch in place

    # While training

    def pass_begins(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], factor: Any, divisor: int
    ) -> Pass:
        """Keep a micro-batch."""
        kept = Pass(function, args, kwargs, factor, divisor, self._draws.begin(self._device))
        if self._mutates:
            kept.copy_batch()
        self._passes.append(kept)
        while len(self._passes) > 1 and sum(each.bytes for each in self._passes) > KEPT_BYTES:
            self._passes.pop(0)
        return kept

    def pass_ended(self, kept: Pass, share: Tensor) -> None:
        kept.share = share
        self._draws.end(kept.random)

    def drop(self) -> None:
        """The window was dropped."""
        self._passes = []

    def forget(self) -> None:
        """The last step: what it ran with is there no more."""
        self._awaited, self._passes, self.last = None, [], []
        self._failed = self._probed = 0  # what fails from here on is another matter

    def policy_changed(self, policy: Mapping[str, Any]) -> None:
        self._policy = policy
        self.forget()

    def before_update(self, number: int, precision: str, loss: Tensor | None, scale: float | None) -> None:
        """The gradients are there. The step before is looked into now, if it was bad: the weights are still its own.

        So is this one, where its loss can be read without waiting: gradients may be finite though the loss is not.
        """
        self.settle()
        readable = loss is not None and loss.device.type == "cpu" and not self._ranks.several
        self._looked_into = readable and not math.isfinite(loss or 0.0)
        if self._looked_into:
            assert loss is not None
            self._explain(Bad(number, precision, float(loss), scale or 1.0, self._passes, self._modes()))

    def closed(self, step: Step, outcome: Outcome) -> None:
        """A window was closed: look now if its outcome is known, else before the next update."""
        self._mutates = self._mutates or any(kept.is_changed for kept in self._passes)
        if not self._looked_into:
            self._awaited = Awaited(step.bare(), outcome, self._passes, self._modes())
        self._passes, self._looked_into = [], False
        if outcome.skip_known:
            self.settle()

    def settle(self) -> None:
        """Come up to date; waits if the last step is still on its way."""
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        step, skipped = awaited.step, awaited.outcome.skipped
        if not skipped:
            self._forgiven = 0
        # Ranks know the same of a skip, and each its own loss only: they look together or not at all.
        if skipped or not (self._ranks.several or math.isfinite(step.loss)):
            scale = awaited.outcome.scale_before
            moved = () if skipped else ("Its gradients were finite, so that the weights have moved by a step since.",)
            kept = awaited.passes, awaited.modes
            self._explain(Bad(step.number, step.precision, step.loss, scale, *kept, moved, awaited.outcome))

    def _explain(self, bad: Bad) -> None:
        try:
            self._look_into(bad)
        except Exception as error:  # ours, or the script's when it is run again; training goes on
            what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
            if self._ranks.speaks:
                say("ampwise: step {} could not be explained: run again, it fails with {}", bad.number, what)

    # A bad step

    def _look_into(self, bad: Bad) -> None:
        together = Together(self._ranks.process_group, several=self._ranks.several, in_step=self._ranks.in_step)
        losses_were_finite = all(together.all_of(math.isfinite(bad.loss)))
        if not losses_were_finite:  # so that no scale would have helped
            self._undo_backoff_of(bad)
        if not bad.passes:
            self._say_in_pieces(bad)
            return
        from ampwise.trace.explaining import findings_of, incident_of

        if not self._is_looked_into(bad, losses_were_finite):
            return
        if drawn := next(filter(None, together.all_of(drawn_from(bad.passes))), ""):
            self._say_drawn(bad, drawn)
            return
        with ExitStack() as stack:
            alone = nullcontext() if together.several else exchanges_refused()
            contexts = (self._as_it_began(bad), as_given(bad.passes), self._ranks.bypassed(), alone)
            for context in (*(around() for around in AROUND), *contexts):
                stack.enter_context(context)
            kept = self._guilty(bad, together)
            subject = self._subject(bad, kept)
            incident = incident_of(subject, together)
            if incident is None:
                return
            if losses_were_finite and incident.kind not in LOWER_SCALES_MAY_HELP:
                self._undo_backoff_of(bad)
            found = findings_of(incident)
            # Saved by the rank where it arose, and told by the first.
            capsules = self.capsules or next(iter(FOR_ALL), None)
            path = None
            if capsules is not None and incident.rank == together.rank:
                path = capsules.save(subject, bad, kept, self._policy, found)
            build = None if capsules is None else capsules.build
            found = _saved_at(next(filter(None, together.all_of(str(path or ""))), ""), build, found)
        if not together.several or together.rank == 0:
            self._tell(found, bad.number)

    def _is_looked_into(self, bad: Bad, loss_was_fine: bool) -> bool:
        """A run that fails at every step is not to take ten times as long: the 1st, 2nd, 4th, 8th of such steps."""
        if loss_was_fine and bad.scale > 1:  # else it is not the scale's doing
            self._probed += 1
            return self._probed <= PROBES + bad.number // PROBED_EVERY
        self._failed += 1
        return self._failed & (self._failed - 1) == 0

    def _undo_backoff_of(self, bad: Bad) -> None:
        """On all ranks or on none, or their scales would move apart; and not of one bad step after the other."""
        undo, together = self._undo_backoff(), self._ranks.alone or self._ranks.several
        if undo is not None and bad.outcome is not None and together and self._forgiven < FORGIVEN:
            self._forgiven += 1
            undo(bad.outcome)

    def _subject(self, bad: Bad, kept: Pass) -> Subject:
        from ampwise.trace.names import named_tensors

        return Subject(
            run=self._running(kept),
            device=self._device,
            models=self._models,
            optimizers=self._optimizers,
            batch=named_tensors(kept.function, kept.args, kept.kwargs),
            precision=bad.precision,
            scale=bad.scale,
            random=kept.random,
            loss=None if kept.share is None else float(kept.share),
            step=bad.number,
            remarks=(*bad.remarks, *self._remarks(kept)),
            function=kept.function,
        )

    def _running(self, kept: Pass) -> Callable[[Settings], Tensor]:
        rerun = self._rerun()
        assert rerun is not None, "the engine is gone"
        return lambda settings: rerun(kept, settings)

    def _guilty(self, bad: Bad, together: Together) -> Pass:
        """Of several micro-batches: the first whose loss is bad; else the first whose gradients are."""
        passes = bad.passes[-min(together.all_of(len(bad.passes))) :]
        flags = together.all_of([kept.share is not None and not math.isfinite(kept.share) for kept in passes])
        bad_losses: list[Pass] = [kept for kept, *on_ranks in zip(passes, *flags, strict=True) if any(on_ranks)]
        if bad_losses:
            return bad_losses[0]
        return passes[-1] if len(passes) == 1 else self._with_bad_gradients(passes, bad.scale, together)

    def _with_bad_gradients(self, passes: Sequence[Pass], scale: float, together: Together) -> Pass:
        from ampwise.trace.replay import Replay

        for kept in passes:
            subject = Subject(
                run=self._running(kept),
                device=self._device,
                models=self._models,
                random=kept.random,
                function=kept.function,
            )
            with Replay(subject) as replay:
                if not together.all_hold(lambda replay=replay: replay.plain(Settings(scale=scale)).finite):  # type: ignore[misc]
                    return kept
        return passes[-1]

    def _remarks(self, kept: Pass) -> Iterator[str]:
        if kept.is_changed and not kept.copies:
            yield (
                "The batch was changed in place by the step, and it was replayed with what is left: what is said to "
                "have come in may have been made here. From now on a copy of the batch is kept."
            )
        if any(map(is_compiled, (*self._models, kept.function))):
            yield "What torch.compile has compiled was replayed as it is written."

    @contextmanager
    def _as_it_began(self, bad: Bad) -> Iterator[None]:
        """Modes, running statistics and other buffers as they were, and afterwards as they are."""
        modes = self._modes()
        self._set_modes(bad.modes)  # first: of layers in evaluation mode no statistics are remembered
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

    def _say_drawn(self, bad: Bad, drawn: str) -> None:
        self._say_once(
            bad,
            f"It was not run again to see why: the loss function takes items from `{drawn}`, and would take the next. "
            "Give it the batch: engine.step(loss_fn, x, y).",
        )

    def _say_in_pieces(self, bad: Bad) -> None:
        self._say_once(
            bad,
            "Which operation it came from can be said of steps that can be run again: engine.step(loss_fn, x, y), or "
            "ampwise.trace(loss_fn, x, y).",
        )

    def _say_once(self, bad: Bad, why: str) -> None:
        """Why a step with a bad loss is not explained."""
        if not self._said_why_not and not math.isfinite(bad.loss) and self._ranks.speaks:
            self._said_why_not = True
            say("ampwise: the loss of step {} is {}. {}", bad.number, bad.loss, why)

    def _tell(self, found: Sequence[Finding], step: int) -> None:
        known = {(finding.rule.code, finding.place.file, finding.place.line) for finding in self.findings}
        new = [each for each in found if (each.rule.code, each.place.file, each.place.line) not in known]
        self.findings += new
        self.last = list(found)
        for listener in LISTENERS:
            for finding in found:
                listener(finding, step)
        if new and not LISTENERS:
            from ampwise.printers import print_findings

            print_findings(new, file=sys.stderr)


def _saved_at(path: str, build: str | None, found: Sequence[Finding]) -> list[Finding]:
    """The findings, which say where the step was saved if it was, and what builds its model where that is known."""
    where = {"capsule": path, **({} if build is None else {"build": build})} if path else {}
    return [each.but(evidence={**each.evidence, **where}) for each in found]

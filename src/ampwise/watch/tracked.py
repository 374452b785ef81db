"""State kept between calls: the followed thread, pending backward passes, optimizers, scalers and schedulers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch import run_events as events
from ampwise.watch.inspection import probe, probed_parameters

__all__ = ["BackwardPass", "FollowedThread", "TrackedOptimizer", "TrackedScaler", "TrackedScheduler"]


class FollowedThread:
    """Call it to see whether a call in this thread is followed: the first that trains and, after its end, the next.

    Reading gradients while another thread computes them could crash the process. Callers must check
    ``torch.compiler.is_compiling()`` first, so that torch.compile does not trace this.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ident: int | None = None  # of this thread; faster to compare
        self.others = False  # other threads have trained as well
        self._paused = False

    def __call__(self) -> bool:
        if self._paused:
            return False
        if self._ident == threading.get_ident():
            return True
        current = threading.current_thread()
        if self._thread is not current:
            if self._thread is not None and self._thread.is_alive():
                self.others = True
                return False
            self._thread, self._ident = current, current.ident
        return True

    def may_be_this(self) -> bool:
        """Return whether a call in this thread is followed, without choosing the thread by it."""
        return not self._paused and (self._thread is None or self._ident == threading.get_ident())

    def stop(self) -> None:
        """Follow nothing any more: wrappers left in place only call the original."""
        self._paused = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no calls within this context: they are ampwise's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


@dataclass(slots=True, eq=False)
class BackwardPass:
    """A backward pass whose gradients no step has used yet."""

    event: events.Backward
    forwards: int  # forward passes so far: two backward passes of one forward are not micro-batches
    loss: Tensor | None  # detached
    scaler: Any = None  # weak reference to the scaler that scaled the loss


@dataclass(slots=True, eq=False)
class TrackedOptimizer:
    """An optimizer: its pending gradients, and what was done to them."""

    index: int
    name: str
    plain: bool
    steps: int = 0
    pending: list[BackwardPass] = field(default_factory=list)
    unscaled_at: CallSite | None = None  # since its last step
    midway: CallSite | None = None  # where gradients were unscaled before more were added
    read: bool = False  # the pending gradients were counted
    by_scaler: bool = False  # the last step was made by a scaler
    bare: bool = False  # the last step was made without a scaler, with pending gradients
    dropped_at: CallSite | None = None  # where zero_grad dropped gradients that no step had used
    dropped_pass: CallSite | None = None  # the backward pass that made them
    updated_at: CallSite | None = None  # where the scaler was updated while gradients were pending
    left: list[Any] = field(default_factory=list)  # probe of the gradients after the last pass
    clipped: bool = False
    losses: dict[bool, Tensor] = field(default_factory=dict)  # sums of losses, by whether they are scaled
    precisions: dict[str, None] = field(default_factory=dict)  # of its models' passes since its last step
    mixed: bool = False  # its models ran in several 16-bit formats, which was reported
    scaled_by: dict[CallSite, list[TrackedScaler]] = field(default_factory=dict)  # scalers, by the line that made them
    stepped_by: Any = None  # the scaler that makes the next step, once its gradients are ready
    poisoned: bool = False  # the weights were updated with non-finite gradients
    unread: bool = False  # the gradients of the last step were not read
    passes: int = 0  # backward passes that gave it gradients
    zeroed: Counter[CallSite] = field(default_factory=Counter)  # calls of zero_grad that dropped unused gradients
    used: list[Any] = field(default_factory=list)  # probe of the gradients after the last step
    used_up: bool = False  # a step has used the gradients, and no later pass has added to them
    left_over: AsyncScalars | None = None  # nonzero values among them, if they are there as the next pass begins
    added_to: AsyncScalars | None = None  # the same, once a pass has added to them
    kept: list[AsyncScalars] = field(default_factory=list)  # the same, for steps on such a sum
    cleared: int = 0  # steps on gradients that were cleared or changed since the step before
    names: list[str] = field(default_factory=list)  # of its parameters
    made_at: CallSite = field(default_factory=CallSite)
    scheduled_at: CallSite | None = None  # where its last scheduler was made
    first_lr: Any = None
    lr: float | None = None  # of its last step
    update: Any = None  # a ``KeptUpdate``, while a step of an optimizer that is not torch's runs
    first_norm: Tensor | None = None  # of its weights, before its first step
    norm: Tensor | None = None  # the last that was finite, on the CPU

    @property
    def scaled(self) -> events.Backward | None:
        """The backward pass that left scaled gradients; None if they are not scaled."""
        if self.unscaled_at is None:
            for each in self.pending:
                if each.event.scaled:
                    return each.event
        return None

    @property
    def scaler(self) -> Any:
        """The scaler of its pending gradients."""
        return next((found for each in self.pending if each.scaler and (found := each.scaler()) is not None), None)

    def forget(self) -> None:
        """Forget the pending gradients."""
        self.pending, self.losses, self.read, self.clipped = [], {}, False, False
        self.unscaled_at = self.midway = self.updated_at = None

    def reset(self) -> None:
        """Reset after a step: its own, or one of an optimizer with which it shares parameters."""
        self.forget()
        self.dropped_at = self.dropped_pass = None
        self.precisions, self.mixed = {}, False

    def undivided(self, optimizer: Any) -> tuple[events.Backward, ...]:
        """Return the first of several passes at one line, of different forwards, whose mean losses were not divided."""
        if len(self.pending) < 2:
            return ()
        first = self.pending[0].event
        if not all(each.event.site == first.site and each.event.loss_is_mean for each in self.pending):
            return ()
        if len({each.forwards for each in self.pending}) < len(self.pending):
            return ()
        changed = probe(probed_parameters(optimizer)) != self.left  # perhaps divided
        return () if changed and not self.clipped and self.unscaled_at is None else (first,)


@dataclass(slots=True, eq=False)
class TrackedScaler:
    """A gradient scaler."""

    made: events.ScalerCreated
    used: bool = False
    steps: int = 0
    since_update: list[int] = field(default_factory=list)  # indices of optimizers stepped
    before_update: list[int] = field(default_factory=list)  # those between the two updates before
    before_that: list[int] = field(default_factory=list)
    updated_at: CallSite | None = None
    # By index of an optimizer: its last unscale, and how many backward passes it had then.
    unscaled: dict[int, tuple[CallSite, int]] = field(default_factory=dict)
    optimizers: dict[int, None] = field(default_factory=dict)  # indices, in the order of their first steps
    precisions: set[str] = field(default_factory=set)
    threads: list[int] = field(default_factory=list)  # ids, the last used at the end
    shared: bool = False  # threads use it in turns


@dataclass(slots=True, eq=False)
class TrackedScheduler:
    """A learning rate scheduler."""

    at_step: int = 0  # its optimizer's step when it last advanced
    moves: int = 0
    each_step: int = 0  # moves that came exactly one step after the last

"""State kept for each optimizer, scaler and scheduler between calls."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ampwise.finding.call_site import CallSite
from ampwise.watch.run_events import Backward, ScalerCreated

__all__ = ["BackwardPass", "TrackedOptimizer", "TrackedScaler", "TrackedScheduler", "WeakStates"]

MOST = 256  # objects; above this, entries of deleted objects are removed
PROBES = 64  # parameters to look at, to see whether an optimizer has got gradients
PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(slots=True, eq=False)
class BackwardPass:
    """A backward pass whose gradients no step has used yet."""

    event: Backward
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

    @property
    def scaled(self) -> Backward | None:
        """The backward pass that left scaled gradients; None if they are not scaled."""
        if self.unscaled_at is not None:
            return None
        return next((each.event for each in self.pending if each.event.scaled), None)

    @property
    def scaler(self) -> Any:
        """The scaler of its pending gradients."""
        return next((found for each in self.pending if each.scaler and (found := each.scaler()) is not None), None)

    def add(self, made: BackwardPass) -> None:
        """Add a backward pass that has added to its gradients."""
        self.pending.append(made)
        self.read = False
        if made.loss is not None:
            scaled = made.event.scaled
            self.losses[scaled] = self.losses[scaled] + made.loss if scaled in self.losses else made.loss

    def forget(self) -> None:
        """Forget the pending gradients."""
        self.pending, self.losses, self.read, self.clipped = [], {}, False, False
        self.unscaled_at = self.midway = self.updated_at = None

    def reset(self) -> None:
        """Reset after a step: its own, or one of an optimizer with which it shares parameters."""
        self.forget()
        self.dropped_at = self.dropped_pass = None
        self.precisions, self.mixed = {}, False


@dataclass(slots=True, eq=False)
class TrackedScaler:
    """A gradient scaler."""

    made: ScalerCreated
    used: bool = False
    steps: int = 0
    since_update: list[int] = field(default_factory=list)  # indices of optimizers stepped
    before_update: list[int] = field(default_factory=list)  # those between the two updates before
    before_that: list[int] = field(default_factory=list)
    updated_at: CallSite | None = None
    optimizers: dict[int, None] = field(default_factory=dict)  # indices, in the order of their first steps
    precisions: set[str] = field(default_factory=set)
    threads: list[int] = field(default_factory=list)  # ids, the last used at the end
    shared: bool = False  # threads use it in turns

    def used_by(self, thread: int) -> None:
        self.used = True
        if thread in self.threads:
            self.shared |= self.threads[-1] != thread
            self.threads.remove(thread)
        self.threads.append(thread)


@dataclass(slots=True, eq=False)
class TrackedScheduler:
    """A learning rate scheduler."""

    at_step: int = 0  # its optimizer's step when it last advanced
    moves: int = 0
    each_step: int = 0  # moves that came exactly one step after the last


T = TypeVar("T")


class WeakStates(Generic[T]):
    """States of objects by identity. Objects are referenced weakly."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, T]] = {}
        self.count = 0  # of objects ever added

    def get(self, thing: Any) -> T | None:
        found = self._by_id.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def add(self, thing: Any, state: T) -> T:
        try:
            refer: Any = weakref.ref(thing)
        except TypeError:
            refer = lambda: thing  # noqa: E731
        if len(self._by_id) >= MOST:
            self._by_id = {key: known for key, known in self._by_id.items() if known[0]() is not None}
        self._by_id[id(thing)] = (refer, state)
        self.count += 1
        return state

    def pairs(self) -> list[tuple[Any, T]]:
        """Return (object, state) for the objects that are alive."""
        return [(thing, state) for refer, state in list(self._by_id.values()) if (thing := refer()) is not None]

    def states(self) -> list[T]:
        """Return the states of all objects, also of deleted ones that are still remembered."""
        return [state for _, state in self._by_id.values()]

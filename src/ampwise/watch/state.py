"""What is remembered of each optimizer, scaler and scheduler between calls."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ampwise.evidence.conduct import Backward, ScalerMade, Site

__all__ = ["Known", "OptimizerState", "Pass", "ScalerState", "SchedulerState"]

MOST = 256  # objects that are remembered after they have gone
PROBES = 64  # parameters by which an optimizer is told to have got gradients
PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(slots=True, eq=False)
class Pass:
    """A backward pass whose gradients are in memory."""

    event: Backward
    forwards: int  # how many had run by then: two passes of one forward are no micro-batches
    loss: Tensor | None  # without a graph
    scaler: Any = None  # a reference to the one whose scale the loss is multiplied by


@dataclass(slots=True, eq=False)
class OptimizerState:
    """An optimizer: the gradients that wait for its step, and what was done to them."""

    index: int
    name: str
    plain: bool
    steps: int = 0
    pending: list[Pass] = field(default_factory=list)
    unscaled_at: Site | None = None  # in this round
    midway: Site | None = None  # unscaled, and then added to
    read: bool = False  # these gradients were counted
    by_scaler: bool = False  # the last step was a scaler's
    bare: bool = False  # stepped without the scaler, with the gradients there are
    dropped_at: Site | None = None  # by zero_grad, before any step took them
    dropped_pass: Site | None = None  # the backward pass whose gradients these were
    updated_at: Site | None = None  # the scaler, while they wait
    left: list[Any] = field(default_factory=list)  # what they were like after the last pass
    clipped: bool = False
    losses: dict[bool, Tensor] = field(default_factory=dict)  # added up, those multiplied by a loss scale apart
    precisions: dict[str, None] = field(default_factory=dict)  # that its models have run in since its last step
    mixed: bool = False  # which a forward pass has shown already
    scaled_by: dict[Site, list[ScalerState]] = field(default_factory=dict)  # where the scalers were made

    @property
    def scaled(self) -> Backward | None:
        """The pass that left gradients multiplied by the loss scale, if they are."""
        if self.unscaled_at is not None:
            return None
        return next((each.event for each in self.pending if each.event.scaled), None)

    @property
    def scaler(self) -> Any:
        """The one whose scale its gradients are, or were, multiplied by."""
        return next((found for each in self.pending if each.scaler and (found := each.scaler()) is not None), None)

    def add(self, made: Pass) -> None:
        """Its gradients have got more."""
        self.pending.append(made)
        self.read = False
        if made.loss is not None:
            scaled = made.event.scaled
            self.losses[scaled] = self.losses[scaled] + made.loss if scaled in self.losses else made.loss

    def forget(self) -> None:
        """Its gradients are gone."""
        self.pending, self.losses, self.read, self.clipped = [], {}, False, False
        self.unscaled_at = self.midway = self.updated_at = None

    def begin_anew(self) -> None:
        """A step has taken the gradients: its own, or that of one it shares them with."""
        self.forget()
        self.dropped_at = self.dropped_pass = None
        self.precisions, self.mixed = {}, False


@dataclass(slots=True, eq=False)
class ScalerState:
    """A scaler."""

    made: ScalerMade
    used: bool = False
    steps: int = 0
    since_update: list[int] = field(default_factory=list)  # optimizers stepped
    before_update: list[int] = field(default_factory=list)  # and between the two updates before
    before_that: list[int] = field(default_factory=list)
    updated_at: Site | None = None
    optimizers: dict[int, None] = field(default_factory=dict)  # in the order of their first steps
    precisions: set[str] = field(default_factory=set)
    threads: list[int] = field(default_factory=list)  # in the order in which they came
    shared: bool = False  # one of them came back after another

    def used_by(self, thread: int) -> None:
        self.used = True
        if thread in self.threads:
            self.shared |= self.threads[-1] != thread
            self.threads.remove(thread)
        self.threads.append(thread)


@dataclass(slots=True, eq=False)
class SchedulerState:
    """A scheduler of learning rates."""

    at_step: int = 0  # of its optimizer, when it last moved
    moves: int = 0
    each_step: int = 0  # moves that followed on exactly one step


T = TypeVar("T")


class Known(Generic[T]):
    """States of objects that come and go, by identity."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, T]] = {}
        self.count = 0  # of all that there have been

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
        """Those that still live."""
        return [(thing, state) for refer, state in list(self._by_id.values()) if (thing := refer()) is not None]

    def states(self) -> list[T]:
        """Those that there have been, as far as they are remembered."""
        return [state for _, state in self._by_id.values()]

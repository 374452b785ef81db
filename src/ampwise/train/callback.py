"""Callbacks: hooks that an Engine calls around each step.

The engine knows nothing of those who use them: explaining bad steps (``ampwise.trace``), ``Sinks``, and the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampwise.train.accumulator import Weight
from ampwise.train.scaler.step_result import StepResult
from ampwise.train.step import Step

if TYPE_CHECKING:
    from ampwise.train.engine import Engine

__all__ = ["Callback", "Hooks", "MicroBatch"]


@dataclass(slots=True)
class MicroBatch:
    """One call of the loss function in a step, by reference: enough for ``engine.rerun``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weight: Weight | None  # of its loss in the step's mean; None: one of ``divisor`` equal ones
    divisor: int


class Callback:
    """Hooks around the steps of an Engine. Each does nothing; override those you need.

    >>> class Print(Callback):
    ...     def after_step(self, step):
    ...         print(step.number, step.skipped)
    """

    def on_attach(self, engine: Engine) -> None:
        """Called when it is added to an engine. Keep only a weak reference, or the engine is never freed.

        Args:
            engine: the engine.
        """

    def on_step_begin(self) -> None:
        """Called before the first micro-batch of a step, after all work of the last one."""

    def on_pass_begin(self, batch: MicroBatch) -> None:
        """Called before a forward pass. Not for ``engine.backward``, whose forward pass is the script's.

        Args:
            batch: the call of the loss function that follows.
        """

    def on_pass_end(self, batch: MicroBatch, loss: Tensor) -> None:
        """Called after a backward pass, with the micro-batch's contribution to the step's loss.

        Args:
            batch: the call of the loss function.
            loss: its contribution to the step's loss.
        """

    def before_update(self, number: int, loss: Tensor | None) -> None:
        """Called when a step's gradients are complete, before weights and optimizer state change.

        Args:
            number: of the step, from 1.
            loss: its loss, on the device.
        """

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Called when a step was applied or skipped, inside the engine. It must not sync or raise.

        Args:
            step: what is known of it; reading a number may sync.
            result: the result on the device.
        """

    def on_step_dropped(self) -> None:
        """Called when the micro-batches of an unfinished step are discarded."""

    def on_reset(self) -> None:
        """Called when the engine's state was loaded or its precision changed: earlier steps cannot be rerun."""

    def on_close(self) -> None:
        """Called by ``engine.close()``: wait for what is still under way."""

    def after_step(self, step: Step) -> None:
        """Called last, between two steps: it may load another state. An exception ends ``engine.step``.

        Args:
            step: the step that was closed.
        """


class Hooks:
    """The callbacks of an engine, by hook: only those that override it, so that an unused hook costs nothing."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)
        self.on_step_begin = self._overriding("on_step_begin")
        self.on_pass_begin = self._overriding("on_pass_begin")
        self.on_pass_end = self._overriding("on_pass_end")
        self.before_update = self._overriding("before_update")
        self.on_step_end = self._overriding("on_step_end")
        self.on_step_dropped = self._overriding("on_step_dropped")
        self.on_reset = self._overriding("on_reset")
        self.after_step = self._overriding("after_step")

    def _overriding(self, hook: str) -> tuple[Callable[..., None], ...]:
        default = getattr(Callback, hook)
        return tuple(getattr(each, hook) for each in self.callbacks if getattr(type(each), hook) is not default)

"""What a precision needs besides autocast: something on the model, around its passes, or around an optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from ampwise.finding import Finding

__all__ = ["Fitting"]

AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class Fitting:
    """Nothing, as FP32, TF32, FP16 and BF16 have it; other precisions have a subclass each.

    One that was made has changed nothing yet: ``put_on`` does, and comes last, when nothing is refused any more.
    """

    phase = 0  # it goes up when what passes do is another than before: graphs of them are captured anew
    plain = False  # passes are to run as they are written, for now: they are in no graph

    @property
    def stays(self) -> str:
        """Why it cannot be taken off again, and what to do; empty where it can."""
        return ""

    def put_on(self) -> None:
        """Change model and optimizers as the precision needs them."""

    def take_off(self) -> None:
        """Undo that, for another precision."""

    def products(self) -> AbstractContextManager[Any]:
        """What forward and backward passes run inside of; entered anew for each."""
        return AS_IT_IS

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """What an optimizer's step runs inside of."""
        return AS_IT_IS

    def step_ended(self) -> None:
        """A window is over, whether its step was taken or skipped. Nothing here may wait for the device."""

    def findings(self) -> list[Finding]:
        """What training in it has lost; may wait for the device."""
        return []

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain data and tensors."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """What ``state`` gave; a BadInput where it does not fit, and nothing has changed."""

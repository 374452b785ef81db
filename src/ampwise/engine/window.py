"""The window: micro-batches whose gradients add up to one step, and what each of them counts in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput

__all__ = ["Weight", "Window", "shared"]

Weight = float | Tensor


class Window:
    """Where a step stands between its first micro-batch and its last.

    The gradient of a window is the mean over its micro-batches, or over their tokens if they are weighed. A loss
    is divided by what the window is expected to hold, before its backward pass. If that turns out to be wrong
    (the data ends early, batches have more or fewer tokens), ``correction`` says by how much.
    """

    def __init__(self, size: int) -> None:
        self.size = size  # micro-batches, as a rule
        self.seen = 0  # micro-batches, of all windows
        self.unit: Weight | None = None  # the weight of a typical micro-batch; the same on all ranks
        self.begin()

    def begin(self) -> None:
        """Without a micro-batch."""
        self.length = self.size  # of this window, as far as is known
        self.divisor = self.size  # of its losses: the length that was known at its first
        self.count = 0  # micro-batches that are complete
        self.loss: Tensor | None = None  # the sum of shares so far, on the device
        self.passes = 0  # backward passes of the micro-batch at hand
        self.pieces_to_come = 0  # of the micro-batch at hand, after this
        self.weight: Weight | None = None  # of the micro-batch at hand
        self.total: Weight | None = None  # of all so far
        self.agreed: Weight | None = None  # the correction by weights, over all ranks

    @property
    def touched(self) -> bool:
        """It has gradients in it."""
        return bool(self.count or self.passes)

    @property
    def remaining(self) -> int:
        """How many micro-batches are wanted still, as a rule."""
        return self.size - self.count

    @property
    def at_its_last(self) -> bool:
        """The micro-batch at hand completes it."""
        return self.count + 1 >= self.length and not self.pieces_to_come

    @property
    def complete(self) -> bool:
        return self.count >= self.length

    def expect(self, more: int) -> None:
        """Only so many more micro-batches are to come."""
        self.length = self.count + more

    def factor(self, weight: Weight | None, settle_unit: Callable[[Weight], float]) -> Weight | None:
        """What the loss of the micro-batch at hand is to be multiplied by; None: divide it by the length."""
        if not self.touched:
            self.divisor = self.length
        if self.passes == 0:
            if self.count and (weight is None) != (self.total is None):
                raise BadInput("some micro-batches of this window have a weight and some do not. Weigh all, or none.")
            self.weight = None if weight is None else _checked(weight)
        elif weight is not None:
            raise BadInput("backward(weight=...): the weight of a micro-batch is given with the first of its losses.")
        if self.weight is None:
            return None
        if self.unit is None:
            self.unit = settle_unit(self.weight)
        factor = self.weight / (self.unit * self.divisor)
        return factor.float() if isinstance(factor, Tensor) else factor  # and the loss no wider than that

    def share(self, loss: Tensor, factor: Weight | None) -> Tensor:
        """What the loss of a micro-batch contributes to that of the window."""
        return shared(loss, factor, self.divisor)

    def add(self, share: Tensor) -> None:
        """A backward pass is done."""
        self.passes += 1
        if share.dtype in (torch.float16, torch.bfloat16):  # in which many shares would not add up
            share = share.float()
        if self.weight is not None:  # the mean of nothing is NaN, and counts for nothing
            nothing = torch.as_tensor(self.weight, device=share.device) == 0
            share = share.masked_fill(nothing, 0.0)
        self.loss = share if self.loss is None else self.loss + share

    def next(self) -> None:
        """The micro-batch at hand is complete."""
        if self.weight is not None:
            self.total = self.weight if self.total is None else self.total + self.weight
        self.count, self.passes, self.weight = self.count + 1, 0, None
        self.seen += 1

    def correction(self) -> Weight | None:
        """What gradients and loss are to be divided by to be means; None if they are."""
        if self.total is None:
            return None if self.count == self.divisor else self.count / self.divisor
        assert self.unit is not None
        return self.total / (self.unit * self.divisor)

    def learn(self) -> None:
        """What is typical, from this window, for the next."""
        if self.unit is None or self.agreed is None:
            return
        seen = self.unit * self.agreed * (self.divisor / self.count)
        if isinstance(seen, Tensor):
            makes_sense = (seen > 0) & seen.isfinite()
            # Each in the way that does not wait for the device.
            if isinstance(self.unit, Tensor):
                self.unit = torch.where(makes_sense, seen, self.unit)
            else:
                self.unit = seen.masked_fill(~makes_sense, self.unit)
        elif 0 < seen < math.inf:
            self.unit = seen


def shared(loss: Tensor, factor: Weight | None, divisor: int) -> Tensor:
    """A loss times its weight, or divided by how many there are."""
    if factor is not None:
        return loss * factor
    return loss if divisor == 1 else loss / divisor


def _checked(weight: Any) -> Weight:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise BadInput(f"weight: one number is expected, not a tensor of shape {tuple(weight.shape)}.")
        # Wide enough for sums of them: a mask may be summed in bytes, or in bits.
        return weight.detach().reshape(()).to(torch.float32 if weight.device.type == "mps" else torch.float64)
    number = math.nan if type(weight) is bool or not isinstance(weight, Real) else float(weight)
    if not 0 <= number < math.inf:
        raise BadInput(f"weight={weight!r}: how much a micro-batch counts is expected, such as its number of tokens.")
    return number

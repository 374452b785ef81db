"""Gradient accumulation: the micro-batches of one step (the accumulation window) and the weight of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import BadInput

__all__ = ["Accumulator", "Weight", "weighted_loss"]

Weight = float | Tensor


class Accumulator:
    """Progress of a step from its first micro-batch to its last.

    The gradient of a step is the mean over its micro-batches, or over their tokens if they are weighted. Each loss is
    divided before its backward pass, by the expected number of micro-batches or tokens. If the number turns out
    different (the data ends early, batches have more or fewer tokens), ``correction`` is the factor between the two.
    """

    def __init__(self, size: int) -> None:
        self.size = size  # micro-batches in a full window
        self.seen = 0  # micro-batches of all windows so far
        self.unit: Weight | None = None  # the weight of a typical micro-batch; the same on all ranks
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self.length = self.size  # expected number of micro-batches in this window
        self.divisor = self.size  # what losses are divided by: the length expected at the first micro-batch
        self.count = 0  # micro-batches that are complete
        self.loss: Tensor | None = None  # the sum of divided losses so far, on the device
        self.passes = 0  # backward passes of the current micro-batch
        self.pieces_left = 0  # further pieces of the current micro-batch
        self.weight: Weight | None = None  # weight of the current micro-batch
        self.total: Weight | None = None  # weight of all micro-batches so far
        self.agreed: Weight | None = None  # the correction by weights, averaged over all ranks

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients of this window."""
        return bool(self.count or self.passes)

    @property
    def remaining(self) -> int:
        """How many micro-batches a full window still needs."""
        return self.size - self.count

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch, or its current piece, is the last of the window."""
        return self.count + 1 >= self.length and not self.pieces_left

    @property
    def complete(self) -> bool:
        return self.count >= self.length

    def expect(self, more: int) -> None:
        """Set the number of micro-batches still to come."""
        self.length = self.count + more

    def factor(self, weight: Weight | None, settle_unit: Callable[[Weight], float]) -> Weight | None:
        """Return the factor for the current micro-batch's loss; None: divide the loss by ``divisor``."""
        if not self.has_gradients:
            self.divisor = self.length
        if self.passes == 0:
            if self.count and (weight is None) != (self.total is None):
                raise BadInput("some micro-batches of this step have a weight and some do not. Weight all or none.")
            self.weight = None if weight is None else _checked(weight)
        elif weight is not None:
            raise BadInput("backward(weight=...): pass the weight of a micro-batch with its first loss only.")
        if self.weight is None:
            return None
        if self.unit is None:
            self.unit = settle_unit(self.weight)
        factor = self.weight / (self.unit * self.divisor)
        return factor.float() if isinstance(factor, Tensor) else factor  # so that the loss does not become FP64

    def share(self, loss: Tensor, factor: Weight | None) -> Tensor:
        """Return what a micro-batch's loss contributes to the mean loss of the step."""
        return weighted_loss(loss, factor, self.divisor)

    def add(self, share: Tensor) -> None:
        """Record a backward pass and add its loss."""
        self.passes += 1
        if share.dtype in (torch.float16, torch.bfloat16):  # sums of many terms would lose digits
            share = share.float()
        if self.weight is not None:  # a micro-batch of weight 0 has a NaN mean, which must not count
            nothing = torch.as_tensor(self.weight, device=share.device) == 0
            share = share.masked_fill(nothing, 0.0)
        self.loss = share if self.loss is None else self.loss + share

    def end_micro_batch(self) -> None:
        """End the current micro-batch."""
        if self.weight is not None:
            self.total = self.weight if self.total is None else self.total + self.weight
        self.count, self.passes, self.weight = self.count + 1, 0, None
        self.seen += 1

    def correction(self) -> Weight | None:
        """Return what gradients and loss must be divided by to become means; None if they are means already."""
        if self.total is None:
            return None if self.count == self.divisor else self.count / self.divisor
        assert self.unit is not None
        return self.total / (self.unit * self.divisor)

    def update_typical_weight(self) -> None:
        """Update the typical weight of a micro-batch from this window."""
        if self.unit is None or self.agreed is None:
            return
        seen = self.unit * self.agreed * (self.divisor / self.count)
        if isinstance(seen, Tensor):
            makes_sense = (seen > 0) & seen.isfinite()
            # Two cases, so that neither syncs with the device.
            if isinstance(self.unit, Tensor):
                self.unit = torch.where(makes_sense, seen, self.unit)
            else:
                self.unit = seen.masked_fill(~makes_sense, self.unit)
        elif 0 < seen < math.inf:
            self.unit = seen


def weighted_loss(loss: Tensor, factor: Weight | None, divisor: int) -> Tensor:
    """Return a loss times its factor, or divided by the number of micro-batches."""
    if factor is not None:
        return loss * factor
    return loss if divisor == 1 else loss / divisor


def _checked(weight: Any) -> Weight:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise BadInput(f"weight: expected a single number, got a tensor of shape {tuple(weight.shape)}.")
        # Wide enough for sums: the weight may be the sum of a mask, in uint8 or bool.
        return weight.detach().reshape(()).to(torch.float32 if weight.device.type == "mps" else torch.float64)
    number = math.nan if type(weight) is bool or not isinstance(weight, Real) else float(weight)
    if not 0 <= number < math.inf:
        raise BadInput(f"weight={weight!r}: expected a finite number of 0 or more, such as the number of tokens.")
    return number

"""Gradient accumulation: the micro-batches of one step (the accumulation window) and the weight of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.scaler.gradients import to_device
from ampwise.train.scaler.step_result import AsyncScalars

__all__ = ["Accumulator", "Weight", "device_scalar", "start_host_copy", "total_weight", "weighted_loss"]

T = TypeVar("T")
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
        self.has_gradients = False  # whether there are gradients of this window
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
    def remaining(self) -> int:
        """How many micro-batches a full window still needs."""
        return self.size - self.count

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch, or its current piece, is the last of the window."""
        return self.count + 1 >= self.length and not self.pieces_left

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

    def add(self, share: Tensor) -> None:
        """Record a backward pass and add its loss."""
        self.passes += 1
        self.has_gradients = True
        if share.dtype in (torch.float16, torch.bfloat16):  # sums of many terms would lose digits
            share = share.float()
        if self.weight is not None:  # a micro-batch of weight 0 has a NaN mean, which must not count
            nothing = torch.as_tensor(self.weight, device=share.device) == 0
            share = share.masked_fill(nothing, 0.0)
        self.loss = share if self.loss is None else self.loss + share

    def end_micro_batch(self) -> bool:
        """End the current micro-batch; return whether it was the last of the window."""
        if self.weight is not None:
            self.total = self.weight if self.total is None else self.total + self.weight
        self.count, self.passes, self.weight = self.count + 1, 0, None
        self.seen += 1
        return self.count >= self.length

    def correction(self) -> Weight | None:
        """Return what gradients and loss must be divided by to become means; None if they are means already."""
        if self.total is None:
            return None if self.count == self.divisor else self.count / self.divisor
        assert self.unit is not None
        return self.total / (self.unit * self.divisor)

    def close(self) -> None:
        """End the window: learn from it what a micro-batch typically weighs, and start a new one."""
        unit, agreed = self.unit, self.agreed
        if unit is not None and agreed is not None:
            seen = unit * agreed * (self.divisor / self.count)
            if not isinstance(seen, Tensor):
                self.unit = seen if 0 < seen < math.inf else unit
            else:
                makes_sense = (seen > 0) & seen.isfinite()
                # Two cases, so that neither syncs with the device.
                if isinstance(unit, Tensor):
                    self.unit = torch.where(makes_sense, seen, unit)
                else:
                    self.unit = seen.masked_fill(~makes_sense, unit)
        self.reset()


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


def total_weight(weights: Iterable[Weight | None]) -> Weight | None:
    """Return the total weight of a micro-batch's pieces; None without weights.

    >>> total_weight([2.0, 3.0]), total_weight([None])
    (5.0, None)
    """
    total: Weight | None = None
    for weight in weights:
        if weight is not None:
            wide = weight.double() if isinstance(weight, Tensor) else weight  # the sum of a mask may be in uint8
            total = wide if total is None else total + wide
    return total


def device_scalar(number: Weight, device: torch.device) -> Tensor:
    """Return a number as an FP32 scalar on the device. ``torch.full``, as a copy from the host would sync."""
    if isinstance(number, Tensor):
        return to_device(number.float(), device)
    return torch.full((), number, dtype=torch.float32, device=device)


def start_host_copy(number: T | Tensor) -> T | AsyncScalars:
    """Start copying a tensor's number to the host, as it may change before it is read; return other numbers as is."""
    return AsyncScalars(number.detach().reshape(1)) if isinstance(number, Tensor) else number

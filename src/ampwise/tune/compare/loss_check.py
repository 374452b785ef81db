"""Check that a precision computes the same loss from the same weights, batch and random numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ampwise.numbers.formats import find_format
from ampwise.numbers.formats.format import Format
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.compare.clocks import Clock
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.snapshot import StateSnapshot, are_finite
from ampwise.tune.compare.speeds import LossCheck
from ampwise.tune.train_case import TrainCase

__all__ = ["LossChecker", "TimedLoss", "tolerance"]

SLACK = 8.0  # rounding errors add up over the depth of a model
FINEST = 2.0**-16  # FP32 with sums in another order: over a million terms, half of its bits
DRAWS = 4  # other seeds, to see how much randomness changes the loss
STRAY = 3.0  # times the largest change seen in so few draws
FP8_FORMAT = "e4m3fn"  # the format of weights and activations


def tolerance(precision: str, loss: float, sensitivity: float, randomness: float = 0.0) -> float:
    """Return how far rounding in this precision may move a loss.

    ``sensitivity`` is how much the loss responds to relative changes of the weights: without it, a loss near zero would
    have to match to more digits than a model has. ``randomness`` is how much other random numbers change the loss:
    kernels of different formats draw in a different order.

    >>> round(tolerance("bf16", 2.0, 0.5), 4), round(tolerance("fp16", 2.0, 0.5), 4)
    (0.1562, 0.0195)
    """
    found = find_format(FP8_FORMAT if precision == "fp8" else precision)
    assert isinstance(found, Format)
    return SLACK * max(found.epsilon, FINEST) * (abs(loss) + sensitivity) + STRAY * randomness


class TimedLoss(NamedTuple):
    """A loss, and the seconds that its forward and backward pass took."""

    loss: LossCheck
    seconds: float


class LossChecker:
    """Compares the losses of contenders, all from the same state. Call it in the contender's turn."""

    def __init__(self, case: TrainCase, clock: Clock) -> None:
        self._case, self._clock = case, clock
        self._random = capture_random(case.device)
        self._buffers = StateSnapshot(case.model)
        self._reference: float | None = None
        self._sensitivity = self._randomness = 0.0

    def check(self, contender: Contender) -> TimedLoss:
        """Check the loss of a contender; that of FP32, which comes first, is the reference."""
        loss, seconds = self._loss(contender)
        finite = contender.step.precision.scaled or are_finite(self._gradients())
        if contender.is_base:
            self._reference, self._sensitivity = loss, self._measured_sensitivity()
            self._randomness = self._measured_randomness(contender, loss)
        contender.step.optimizer.zero_grad(set_to_none=True)
        allowed = None
        if self._reference is not None:
            allowed = tolerance(contender.precision, self._reference, self._sensitivity, self._randomness)
        found = LossCheck(loss=loss, reference=self._reference, tolerance=allowed, finite_gradients=finite)
        return TimedLoss(found, seconds)

    def _loss(self, contender: Contender, draw: int = 0) -> tuple[float, float]:
        """Return loss and seconds from the saved state; ``draw`` selects other random numbers than the first."""
        contender.step.optimizer.zero_grad(set_to_none=True)
        self._restore()
        if draw:
            _seed(draw, self._case.device)
        losses: list[Tensor] = []
        seconds = self._clock(lambda: losses.append(contender.step.forward_and_backward()), 1)
        self._restore()
        return float(losses[-1]), seconds

    def _restore(self) -> None:
        restore_random(self._random, self._case.device)
        self._buffers.restore()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._case.parameters if parameter.grad is not None]

    def _measured_sensitivity(self) -> float:
        """Return the change of the loss, to first order, if each weight changed by its own size, at random."""
        norms = [
            torch.linalg.vector_norm(parameter.detach() * parameter.grad, dtype=torch.float64)
            for parameter in self._case.parameters
            if parameter.grad is not None
        ]
        found = float(torch.stack(norms).norm()) if norms else 0.0
        return found if math.isfinite(found) else 0.0

    def _measured_randomness(self, contender: Contender, loss: float) -> float:
        """Return how far other random numbers move the loss; a model that draws none is run only once."""
        farthest = 0.0
        for draw in range(1, DRAWS + 1):
            farthest = max(farthest, abs(self._loss(contender, draw)[0] - loss))
            if farthest <= FINEST * abs(loss):
                break
        return farthest if math.isfinite(farthest) else 0.0


def _seed(draw: int, device: torch.device) -> None:
    """Seed the CPU and this device only: other devices' generators are not restored afterwards."""
    torch.default_generator.manual_seed(draw)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(draw)
    elif device.type != "cpu":
        getattr(torch, device.type).manual_seed(draw)

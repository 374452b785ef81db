"""Whether a precision computes the same: the loss of the same weights, batch and random numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ampwise.evidence.speed import LossCheck
from ampwise.formats import find_format
from ampwise.formats.format import Format
from ampwise.randomness import captured, restore_random
from ampwise.tune.compare.contender import Contender
from ampwise.tune.compare.snapshot import Buffers, are_finite
from ampwise.tune.compare.timing import Clock
from ampwise.tune.subject import Subject

__all__ = ["Checked", "LossCheckup", "tolerance"]

SLACK = 8.0  # roundings add up over the depth of a model
FINEST = 2.0**-16  # FP32 in another order of its sums: over a million terms, half of its bits
DRAWS = 4  # of other random numbers, to see how far these take the loss
STRAY = 3.0  # times as far as was seen in so few draws
FP8_FORMAT = "e4m3fn"  # of weights and activations


def tolerance(precision: str, loss: float, sensitivity: float, randomness: float = 0.0) -> float:
    """How far rounding in this precision may take a loss.

    ``sensitivity`` is how much the loss answers to relative changes of the weights: without it, a loss near zero would
    have to be met to more digits than a model has. ``randomness`` is how far other random numbers take it: kernels of
    different formats draw in a different order.

    >>> round(tolerance("bf16", 2.0, 0.5), 4), round(tolerance("fp16", 2.0, 0.5), 4)
    (0.1562, 0.0195)
    """
    found = find_format(FP8_FORMAT if precision == "fp8" else precision)
    assert isinstance(found, Format)
    return SLACK * max(found.epsilon, FINEST) * (abs(loss) + sensitivity) + STRAY * randomness


class Checked(NamedTuple):
    """A loss, and the seconds that a forward and a backward pass took for it."""

    loss: LossCheck
    seconds: float


class LossCheckup:
    """Asks contenders for their loss, each from where the first one began. The caller has given each its turn."""

    def __init__(self, subject: Subject, clock: Clock) -> None:
        self._subject, self._clock = subject, clock
        self._random = captured(subject.device)
        self._buffers = Buffers(subject.model)
        self._reference: float | None = None
        self._sensitivity = self._randomness = 0.0

    def check(self, contender: Contender) -> Checked:
        """Its loss; that of FP32, which comes first, is what the others are held to."""
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
        return Checked(found, seconds)

    def _loss(self, contender: Contender, draw: int = 0) -> tuple[float, float]:
        """From the same state; with ``draw``, from other random numbers than the first."""
        contender.step.optimizer.zero_grad(set_to_none=True)
        self._restore()
        if draw:
            _seed(draw, self._subject.device)
        losses: list[Tensor] = []
        seconds = self._clock(lambda: losses.append(contender.step.forward_and_backward()), 1)
        self._restore()
        return float(losses[-1]), seconds

    def _restore(self) -> None:
        restore_random(self._random, self._subject.device)
        self._buffers.restore()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._subject.parameters if parameter.grad is not None]

    def _measured_sensitivity(self) -> float:
        """What the loss would change by, to first order, if each weight changed by its own size, at random."""
        norms = [
            torch.linalg.vector_norm(parameter.detach() * parameter.grad, dtype=torch.float64)
            for parameter in self._subject.parameters
            if parameter.grad is not None
        ]
        found = float(torch.stack(norms).norm()) if norms else 0.0
        return found if math.isfinite(found) else 0.0

    def _measured_randomness(self, contender: Contender, loss: float) -> float:
        """How far other random numbers take the loss; most models draw none in training, and are asked once."""
        farthest = 0.0
        for draw in range(1, DRAWS + 1):
            farthest = max(farthest, abs(self._loss(contender, draw)[0] - loss))
            if farthest <= FINEST * abs(loss):
                break
        return farthest if math.isfinite(farthest) else 0.0


def _seed(draw: int, device: torch.device) -> None:
    """Of the CPU and of this device: those of other devices are not put back afterwards."""
    torch.default_generator.manual_seed(draw)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(draw)
    elif device.type != "cpu":
        getattr(torch, device.type).manual_seed(draw)

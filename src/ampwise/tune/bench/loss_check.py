"""Check that a precision computes the same loss from the same state, and that its steps keep the weights finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.numbers.formats import find_format
from ampwise.numbers.formats.format import Format
from ampwise.train.random_state import capture_random, restore_random
from ampwise.tune.bench.clocks import Clock
from ampwise.tune.bench.lineup import Contender
from ampwise.tune.bench.speeds import LossCheck
from ampwise.tune.train_case import TrainCase

SLACK = 8.0  # rounding errors add up over the depth of a model
FINEST = 2.0**-16  # FP32 with sums in another order: over a million terms, half of its bits
DRAWS = 4  # other seeds, to see how much randomness changes the loss
STRAY = 3.0  # times the largest change seen in so few draws
FP8_FORMAT = "e4m3fn"  # the format of weights and activations
WHAT_TO_DO = "lower the learning rate of the optimizer that it returns, or return none."


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


class LossChecker:
    """Compares the losses of contenders, all from the same state. Call it in the contender's turn."""

    def __init__(self, case: TrainCase, clock: Clock) -> None:
        self._case, self._clock = case, clock
        self._random = capture_random(case.device)
        self._buffers = SavedBuffers(case.model)
        self._reference: float | None = None
        self._sensitivity = self._randomness = 0.0

    def check(self, contender: Contender) -> tuple[LossCheck, float]:
        """Check the loss of a contender; that of FP32, which comes first, is the reference.

        Return the seconds of its forward and backward pass, too.
        """
        loss, seconds = self._loss(contender)
        trained = [(each.detach(), each.grad) for each in self._case.parameters if each.grad is not None]
        finite = contender.step.precision.scaled or are_finite(grad for _, grad in trained)
        if contender.is_base:
            self._reference = loss
            # The change of the loss, to first order, if each weight changed by its own size, at random.
            norms = [torch.linalg.vector_norm(weight * grad, dtype=torch.float64) for weight, grad in trained]
            self._sensitivity = _if_finite(float(torch.stack(norms).norm())) if norms else 0.0
            del trained, norms  # or the next pass would need memory for two sets of gradients
            farthest = 0.0  # how far other random numbers move the loss
            for draw in range(1, DRAWS + 1):
                farthest = max(farthest, abs(self._loss(contender, draw)[0] - loss))
                if farthest <= FINEST * abs(loss):
                    break  # the model draws none
            self._randomness = _if_finite(farthest)
        contender.step.optimizer.zero_grad(set_to_none=True)
        allowed = None
        if self._reference is not None:
            allowed = tolerance(contender.precision, self._reference, self._sensitivity, self._randomness)
        return LossCheck(loss=loss, reference=self._reference, tolerance=allowed, finite_gradients=finite), seconds

    def _loss(self, contender: Contender, draw: int = 0) -> tuple[float, float]:
        """Return loss and seconds from the saved state; ``draw`` selects other random numbers than the first."""
        device = self._case.device
        contender.step.optimizer.zero_grad(set_to_none=True)
        self._restore()
        if draw:  # seed the CPU and this device only: other devices' generators are not restored afterwards
            torch.default_generator.manual_seed(draw)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(draw)
            elif device.type != "cpu":
                getattr(torch, device.type).manual_seed(draw)
        losses: list[Tensor] = []
        seconds = self._clock(lambda: losses.append(contender.step.forward_and_backward()), 1)
        self._restore()
        return float(losses[-1]), seconds

    def _restore(self) -> None:
        restore_random(self._random, self._case.device)
        self._buffers.restore()


class WeightGuard:
    """Checks the weights after steps, and restores the initial ones if they are not finite.

    The copy of weights, buffers and the optimizer's state is in the host's memory, as the device's may be full.
    """

    def __init__(self, case: TrainCase, optimizer: Optimizer) -> None:
        self._case, self._optimizer = case, optimizer
        self._weights = [(weight, weight.detach().to("cpu", copy=True)) for weight in case.model.parameters()]
        self._buffers = SavedBuffers(case.model)
        self._state = copy.deepcopy(optimizer.state_dict())  # before the first step, next to nothing

    def look(self, contender: Contender) -> None:
        """Check after steps of this contender; it drops out if the weights are not finite."""
        if are_finite(self._case.parameters):
            return
        if contender.is_base:
            raise BadInput(f"{self._case.name}: the weights are not finite after a few steps in FP32: {WHAT_TO_DO}")
        contender.problem = "not finite: the weights, after a few steps"
        with torch.no_grad():
            for weight, saved in self._weights:
                weight.copy_(saved)
            self._buffers.restore()
            self._optimizer.load_state_dict(copy.deepcopy(self._state))

    def insist(self) -> None:
        """Raise BadInput at the end if the weights are not finite: such times are not reported."""
        if not are_finite(self._case.parameters):
            raise BadInput(f"{self._case.name}: the weights are not finite after the measured steps: {WHAT_TO_DO}")


class SavedBuffers:
    """Copy of a model's buffers, by name: a forward pass may add some, or replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved = {name: buffer.detach().clone() for name, buffer in _writable_buffers(model)}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers that still exist with the same shape."""
        for name, buffer in _writable_buffers(self._model):
            saved = self._saved.get(name)
            if saved is not None and saved.shape == buffer.shape:
                buffer.copy_(saved)


def _writable_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that can be written: not expanded ones, whose elements share memory, nor uninitialized ones."""
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            continue
        shared = any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if not shared:
            yield name, buffer


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite. Syncs the device once."""
    values = (tensor.detach()._values() if tensor.is_sparse else tensor.detach() for tensor in tensors)
    found = [torch.isfinite(each).all() for each in values]
    return all(bool(each) for each in torch.stack(found).cpu()) if found else True


def _if_finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0

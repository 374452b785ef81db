"""A training step of fake tensors, followed by a tracker: forward, backward, clip, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.arithmetic import Arithmetic
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import Precision
from ampwise.engine.pure_fitting import PureFitting
from ampwise.low_bit.care import rounds_by_chance
from ampwise.low_bit.pure import PURE
from ampwise.trace.replay import uncollected
from ampwise.tune.memory.log import COMPENSATION, GRADIENTS, INPUTS, PARAMETERS, STATE, Log
from ampwise.tune.memory.scratch import SCRATCH
from ampwise.tune.memory.tracker import FORWARD, Tracker
from ampwise.tune.subject import Subject

__all__ = ["BACKWARD", "CLIP", "UPDATE", "track"]

BACKWARD, CLIP, UPDATE = "backward", "clip", "update"
STEPS = 2.0  # what an optimizer reads as the number of steps taken


def track(subject: Subject, precision: Precision, optimizer: Optimizer) -> Log:
    """The memory of a step in the midst of training, when the optimizer has its state."""
    fitting = _put_on(subject, precision, optimizer)
    tracker = Tracker(SCRATCH)
    arithmetic = Arithmetic(precision, "cpu")
    trained = subject.parameters
    _as_on_cuda(optimizer)
    # When it would be collected is chance; what is garbage here is held in the user's training too, until it comes.
    with tracker, uncollected():
        tracker.adopt(PARAMETERS, subject.model.parameters())
        tracker.adopt(INPUTS, (*subject.model.buffers(), *subject.tensors))
        _make_state(optimizer, trained, tracker, fitting)
        with tracker.phase(FORWARD), arithmetic.forward():
            loss = subject.loss()
        with tracker.phase(BACKWARD):
            loss.backward()
        tracker.adopt(GRADIENTS, _gradients(trained))
        with tracker.phase(CLIP):
            clip_grad_norm_(trained, 1.0, foreach=True)
        with tracker.phase(UPDATE), tracker.reading(STEPS), fitting.stepping(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tracker.log()


def _put_on(subject: Subject, precision: Precision, optimizer: Optimizer) -> Fitting:
    """Weights in BF16, where the precision has them so."""
    if precision.pure is None:
        return Fitting()
    # Of torchao's optimizers, which are modelled here, it is known that they treat each parameter by itself.
    pure = replace(precision.pure, elementwise=precision.pure.elementwise or rounds_by_chance(optimizer))
    fitting = PureFitting([subject.model], Policy(PURE), [optimizer], pure)
    fitting.put_on()
    return fitting


def _make_state(optimizer: Optimizer, trained: Iterable[Tensor], tracker: Tracker, fitting: Fitting) -> None:
    """Have the optimizer make its state, as it does in the first step."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    with tracker.reading(STEPS), fitting.stepping(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker.adopt(COMPENSATION, fitting.rests if isinstance(fitting, PureFitting) else ())
    state = tree_leaves(list(optimizer.state.values()))
    tracker.adopt(STATE, (leaf for leaf in state if isinstance(leaf, Tensor)))


def _gradients(trained: Iterable[Tensor]) -> Iterator[Tensor]:
    return (parameter.grad for parameter in trained if parameter.grad is not None)


def _as_on_cuda(optimizer: Optimizer) -> None:
    """Left to itself, an optimizer updates CUDA's parameters all at once, which takes more memory than one by one."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True

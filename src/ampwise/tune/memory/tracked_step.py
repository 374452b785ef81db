"""Run a training step on fake tensors under the tracker: forward, backward, clip, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ampwise.trace.replay import gc_disabled
from ampwise.train.low_bit.pure_bf16 import PURE
from ampwise.train.low_bit.safe_updates import has_stochastic_rounding
from ampwise.train.precision.contexts import PrecisionContexts
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import TrainPrecision
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.pure_bf16_plugin import PureBf16Plugin
from ampwise.tune.memory.allocation_log import COMPENSATION, GRADIENTS, INPUTS, PARAMETERS, STATE, AllocationLog
from ampwise.tune.memory.kernel_buffers import SCRATCH
from ampwise.tune.memory.tracker import FORWARD, AllocationTracker
from ampwise.tune.train_case import TrainCase

__all__ = ["BACKWARD", "CLIP", "UPDATE", "track"]

BACKWARD, CLIP, UPDATE = "backward", "clip", "update"
STEPS = 2.0  # the value an optimizer reads as its step count


def track(case: TrainCase, precision: TrainPrecision, optimizer: Optimizer) -> AllocationLog:
    """Return the memory log of a step during training, when the optimizer has its state."""
    plugin = _apply_precision(case, precision, optimizer)
    tracker = AllocationTracker(SCRATCH)
    arithmetic = PrecisionContexts(precision, "cpu")
    trained = case.parameters
    _use_cuda_defaults(optimizer)
    # Garbage collection at random times would change the log; in training, garbage is held until it is collected, too.
    with tracker, gc_disabled():
        tracker.adopt(PARAMETERS, case.model.parameters())
        tracker.adopt(INPUTS, (*case.model.buffers(), *case.tensors))
        _make_state(optimizer, trained, tracker, plugin)
        with tracker.phase(FORWARD), arithmetic.forward():
            loss = case.loss()
        with tracker.phase(BACKWARD):
            loss.backward()
        tracker.adopt(GRADIENTS, _gradients(trained))
        with tracker.phase(CLIP):
            clip_grad_norm_(trained, 1.0, foreach=True)
        with tracker.phase(UPDATE), tracker.reading(STEPS), plugin.step_context(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tracker.log()


def _apply_precision(case: TrainCase, precision: TrainPrecision, optimizer: Optimizer) -> PrecisionPlugin:
    """Convert weights to BF16, where the precision does so."""
    if precision.pure is None:
        return PrecisionPlugin()
    # torchao's optimizers, modelled here, treat each parameter by itself.
    pure = replace(precision.pure, elementwise=precision.pure.elementwise or has_stochastic_rounding(optimizer))
    plugin = PureBf16Plugin([case.model], Policy(PURE), [optimizer], pure)
    plugin.install()
    return plugin


def _make_state(
    optimizer: Optimizer, trained: Iterable[Tensor], tracker: AllocationTracker, plugin: PrecisionPlugin
) -> None:
    """Make the optimizer create its state, as in its first step."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    with tracker.reading(STEPS), plugin.step_context(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tracker.adopt(COMPENSATION, plugin.rests if isinstance(plugin, PureBf16Plugin) else ())
    state = tree_leaves(list(optimizer.state.values()))
    tracker.adopt(STATE, (leaf for leaf in state if isinstance(leaf, Tensor)))


def _gradients(trained: Iterable[Tensor]) -> Iterator[Tensor]:
    return (parameter.grad for parameter in trained if parameter.grad is not None)


def _use_cuda_defaults(optimizer: Optimizer) -> None:
    """Use foreach updates, CUDA's default, which take more memory than one by one."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True

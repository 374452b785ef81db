"""Read an optimizer's state for a weight that is not finite although its gradients were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.trace.failure import OptimizerFacts
from ampwise.trace.recorder import dtype_name
from ampwise.trace.value_ranges import local_shard

__all__ = ["optimizer_facts_of"]


# Names of the state that optimizers divide by (or by its root): Adam, RMSprop, Adagrad, Adamax.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


def optimizer_facts_of(optimizers: Sequence[Optimizer], parameter: Tensor, *, taken: int = 0) -> OptimizerFacts | None:
    """Describe the optimizer that trains a parameter; None if there is none, or it has taken no step yet.

    taken: the number of steps so far, for an optimizer that does not count them.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(each is parameter for each in group["params"]):
                return _facts(optimizer, group, parameter, taken)
    return None


def _facts(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, taken: int) -> OptimizerFacts | None:
    state = optimizer.state.get(parameter, {})
    # An optimizer with eps has state from its first step on: without state, all steps so far were skipped.
    uncounted = taken if "eps" not in group else 0
    steps = int(float(state.get("step", uncounted or (1 if state else 0))))
    facts = OptimizerFacts(name=type(optimizer).__name__, steps=steps, lr=_learning_rate(group))
    if not steps:
        return facts if facts.has_absurd_lr else None
    values = local_shard(parameter).detach()
    bad = values.isfinite().logical_not()
    eps, second = group.get("eps"), next((state[name] for name in SECOND_MOMENTS if name in state), None)
    zeros = None
    if isinstance(second, Tensor) and second.shape == parameter.shape:
        zeros = int(((local_shard(second) == 0) & bad).sum())
    return replace(
        facts,
        eps=float(eps) if isinstance(eps, int | float) else None,
        eps_becomes=float(torch.tensor(eps, dtype=values.dtype)) if isinstance(eps, int | float) else None,
        dtype=dtype_name(values.dtype),
        zero_denominators=zeros,
        bad_weights=int(bad.sum()),
    )


def _learning_rate(group: dict[str, Any]) -> float | None:
    rate = group.get("lr")
    return float(rate) if isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.numel() == 1) else None

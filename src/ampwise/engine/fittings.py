"""Which fitting a precision has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.engine.emulated_fitting import EmulatedFitting
from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import Precision

__all__ = ["fitting_for"]


def fitting_for(
    precision: Precision,
    policy: Policy,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> Fitting:
    """What a precision needs on these models and optimizers, not put on yet; an error where it cannot be had."""
    if precision.recipe is not None:
        return EmulatedFitting(models, policy, precision.recipe)
    return Fitting()

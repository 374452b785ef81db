"""Which fitting a precision has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.engine.emulated_fitting import EmulatedFitting
from ampwise.engine.fitting import Fitting
from ampwise.engine.precision.policy import Policy
from ampwise.engine.precision.precision import Precision
from ampwise.engine.pure_fitting import PureFitting
from ampwise.errors import BadInput

__all__ = ["fitting_for"]


def fitting_for(
    precision: Precision,
    policy: Policy,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    fp8: Any = None,
    *,
    graphed: bool = False,
) -> Fitting:
    """What a precision needs on these models and optimizers, not put on yet; an error where it cannot be had.

    graphed: passes will be replayed by CUDA graphs.
    """
    if precision.recipe is not None:
        return EmulatedFitting(models, policy, precision.recipe)
    if precision.pure is not None:
        return PureFitting(models, policy, optimizers, precision.pure)
    if precision.name == "fp8":
        from ampwise.engine.fp8_fitting import Fp8Fitting  # which few need

        return Fp8Fitting(models, policy, fp8, device, graphed=graphed)
    if fp8 is not None:
        raise BadInput(
            f"Engine(precision={precision.name!r}, fp8={fp8!r}): fp8 is for precision='fp8', or Policy('fp8')."
        )
    return Fitting()

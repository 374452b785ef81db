"""Create the plugin of a precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampwise.errors import BadInput
from ampwise.train.emulation_plugin import EmulationPlugin
from ampwise.train.precision.policy import Policy
from ampwise.train.precision.precision import TrainPrecision
from ampwise.train.precision_plugin import PrecisionPlugin
from ampwise.train.pure_bf16_plugin import PureBf16Plugin

__all__ = ["make_plugin"]


def make_plugin(
    precision: TrainPrecision,
    policy: Policy,
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    device: torch.device,
    fp8: Any = None,
    *,
    graphed: bool = False,
) -> PrecisionPlugin:
    """Return the plugin of a precision for these models and optimizers, not yet installed; raise if it cannot work.

    graphed: passes will be replayed by CUDA graphs.
    """
    if precision.recipe is not None:
        return EmulationPlugin(models, policy, precision.recipe)
    if precision.pure is not None:
        return PureBf16Plugin(models, policy, optimizers, precision.pure)
    if precision.name == "fp8":
        from ampwise.train.fp8_plugin import Fp8Plugin  # rarely needed

        return Fp8Plugin(models, policy, fp8, device, graphed=graphed)
    if fp8 is not None:
        raise BadInput(
            f"Engine(precision={precision.name!r}, fp8={fp8!r}): fp8=... needs precision='fp8' or Policy('fp8')."
        )
    return PrecisionPlugin()

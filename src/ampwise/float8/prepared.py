"""Layers that ``prepare`` has made torchao's before there was an engine: run wide for a while, and then as they were.

Their class has a forward of its own, and stays. A wide one has that of ``nn.Linear`` put on, inside of the region that
a policy may have around it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ampwise.engine.precision.region import forward_in, is_forward_in

__all__ = ["GATHERED", "gathers_in_fp8", "is_prepared", "is_wide", "narrow", "under_policies", "widen"]

TORCHAO_LAYER = "Float8Linear"
GATHERED = (  # why a layer cannot be wide
    "its weights come in FP8 only, as FSDP2 gathers them. Prepare the model with prepare(model, all_gather=False), or "
    "not at all."
)


def is_prepared(module: nn.Module) -> bool:
    """Whether it is a layer of torchao's."""
    return any(each.__name__ == TORCHAO_LAYER for each in type(module).__mro__)


def gathers_in_fp8(module: nn.Module) -> bool:
    """Whether FSDP2 brings its weight in FP8, so that nothing wider is there to compute with."""
    return bool(getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False))


def under_policies(module: nn.Module) -> Any:
    """The forward that was put on a module, without the regions of policies, which are taken off before layers are."""
    put_on: Any = module.__dict__.get("forward")
    while is_forward_in(put_on) and put_on.owner is not None:
        put_on = put_on.args[-1]
    return put_on


def is_wide(module: nn.Module) -> bool:
    """Whether ``nn.Linear``'s forward was put on it."""
    return getattr(under_policies(module), "__func__", None) is nn.Linear.forward


def widen(module: nn.Linear) -> None:
    """Compute it as ``nn.Linear`` does. A forward that someone else has put on stays."""
    region = module.__dict__.get("forward")
    if under_policies(module) is None:
        module.forward = MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]
        if region is not None:
            module.forward = forward_in(region.args[1], module, owner=region.owner)  # type: ignore[method-assign]


def narrow(module: nn.Module) -> None:
    """As its class has it again. No policy has a region on a layer that is to be narrow."""
    if is_wide(module):
        module.__dict__.pop("forward", None)

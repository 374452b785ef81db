"""Switch layers that ``prepare`` converted to torchao's between their FP8 forward and ``nn.Linear``'s.

Their class, with its FP8 forward, stays. To run one in BF16, ``nn.Linear``'s forward is installed on the module, inside
the precision that a policy may have set for it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from ampwise.train.precision.call_in_precision import is_wrapped_forward, wrap_forward

__all__ = [
    "GATHERED_IN_FP8",
    "forward_without_policies",
    "gathers_in_fp8",
    "is_prepared",
    "use_fp8_forward",
    "use_linear_forward",
    "uses_linear_forward",
]

TORCHAO_LAYER = "Float8Linear"
GATHERED_IN_FP8 = (  # why a layer cannot run in BF16
    "FSDP2 gathers its weights in FP8. Prepare the model with prepare(model, all_gather=False), or not at all."
)


def is_prepared(module: nn.Module) -> bool:
    """Return whether it is a torchao FP8 layer."""
    return any(each.__name__ == TORCHAO_LAYER for each in type(module).__mro__)


def gathers_in_fp8(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers its weight in FP8, so that the layer cannot run in BF16."""
    return bool(getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False))


def forward_without_policies(module: nn.Module) -> Any:
    """Return the forward installed on a module, without the wrappers of policies."""
    installed: Any = module.__dict__.get("forward")
    while is_wrapped_forward(installed) and installed.owner is not None:
        installed = installed.args[-1]
    return installed


def uses_linear_forward(module: nn.Module) -> bool:
    """Return whether ``nn.Linear``'s forward is installed on it."""
    return getattr(forward_without_policies(module), "__func__", None) is nn.Linear.forward


def use_linear_forward(module: nn.Linear) -> None:
    """Install ``nn.Linear``'s forward, unless another forward is installed."""
    region = module.__dict__.get("forward")
    if forward_without_policies(module) is None:
        module.forward = MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]
        if region is not None:
            module.forward = wrap_forward(region.args[1], module, owner=region.owner)  # type: ignore[method-assign]


def use_fp8_forward(module: nn.Module) -> None:
    """Restore the FP8 forward of its class. No policy wraps a layer that runs in FP8."""
    if uses_linear_forward(module):
        module.__dict__.pop("forward", None)

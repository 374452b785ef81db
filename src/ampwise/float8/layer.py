"""A linear layer in FP8: the module stays the object it is, with a forward of its own for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.errors import BadInput
from ampwise.float8.product import linear

__all__ = ["SLOT", "How", "Noting", "Ours", "fit", "is_fitted", "unfit"]

How = Callable[[nn.Linear, Tensor], Tensor]

# What a layer has while it is fitted: how it is computed, and for delayed scaling its scales and its slot.
# On the module, so that ``how`` can be the same for many: torch.compile then compiles blocks alike once.
HOW, SCALES, SLOT = "fp8_layer", "fp8_scales", "fp8_slot"


class Ours:
    """ampwise's own layer."""

    def __init__(self, *, e5m2: bool) -> None:
        self.e5m2 = e5m2

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        if hasattr(module.weight, "device_mesh"):
            raise BadInput(
                "an FP8 layer by ampwise was given a weight that is split over ranks (a DTensor): it takes whole ones, "
                'as DDP and FSDP have them. For tensor parallelism use Fp8("tensorwise"), by torchao.'
            )
        known: Any = module
        return linear(x, module.weight, module.bias, known.fp8_scales, known.fp8_slot, self.e5m2)


class Noting:
    """A layer as it is, that notes what it is given, and whether torch.compile would have compiled it."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, torch.dtype]] = set()
        self.compiled = False

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.numel():
            if not self.shapes:
                self.compiled = _is_under_compile()
            self.shapes.add((x.numel() // x.shape[-1], x.dtype))
        return F.linear(x, module.weight, module.bias)


def _is_under_compile() -> bool:
    """Whether what torch.compile has returned is being called, though for now it is told to compile nothing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


def fit(module: nn.Linear, how: How, slot: Tensor | None = None, scales: Tensor | None = None) -> None:
    """Have a layer run so. Parameters, hooks and the state dict stay as they are.

    By a method, of which torch.compile asks only whose function it is; a partial would be another for each layer.
    """
    unfit(module)
    put_on = getattr(how, "put_on", None)
    if put_on is not None:
        put_on(module)
    module.__dict__.update({HOW: how, SLOT: slot, SCALES: scales})
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def unfit(module: nn.Module) -> None:
    """As it was."""
    if is_fitted(module):
        take_off = getattr(module.__dict__[HOW], "take_off", None)
        if take_off is not None:
            take_off(module)
        for name in (HOW, SLOT, SCALES, "forward"):
            module.__dict__.pop(name, None)


def is_fitted(module: nn.Module) -> bool:
    """Whether ``fit`` was called on it. A copy by pickle is not: it has the forward of its class."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def forward(module: nn.Linear, input: Any) -> Tensor:
    """The one of fitted layers, by the name that pickle will look for.

    Where a model turns autocast off for what it wants in FP32, that is what it gets, as in BF16.
    """
    if input.dtype == torch.float32 and not torch.is_autocast_enabled(input.device.type):
        return F.linear(input, module.weight, module.bias)
    how: How = module.fp8_layer  # type: ignore[assignment]
    return how(module, input)

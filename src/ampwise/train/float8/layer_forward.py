"""Run a linear layer in FP8 by replacing its forward; the module stays the same object."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.errors import BadInput
from ampwise.train.float8.block_linear import block_linear
from ampwise.train.float8.fp8_cast import Fp8Matrix
from ampwise.train.float8.fp8_linear import fp8_linear
from ampwise.train.float8.recipe import MATMULS

__all__ = [
    "SLOT",
    "AmpwiseForward",
    "BlockForward",
    "Fp8Forward",
    "ShapeRecorder",
    "has_fp8_forward",
    "install_forward",
    "remove_forward",
    "use_kept_weight",
]

# Computes a layer. If it has ``attributes``, a dict, they are set on the layer while it is installed.
Fp8Forward = Callable[[nn.Linear, Tensor], Tensor]

# Attributes of a layer with an FP8 forward: the forward, for delayed scaling its scales and its slot, and a copy of its
# weight in FP8 while that is kept. They are on the module, so that many layers can share a forward: torch.compile then
# compiles identical blocks once.
FORWARD, SCALES, SLOT, WEIGHT = "fp8_layer", "fp8_scales", "fp8_slot", "fp8_weight"


class AmpwiseForward:
    """ampwise's own FP8 forward."""

    def __init__(self, *, e5m2: bool, matmuls: tuple[str, ...] = MATMULS) -> None:
        self.e5m2 = e5m2
        self.narrow = tuple(each in matmuls for each in MATMULS)

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        _refuse_split_weight(module)
        known: Any = module
        forward, dgrad, wgrad = self.narrow
        return fp8_linear(
            x, module.weight, module.bias, known.fp8_scales, known.fp8_slot, self.e5m2, forward, dgrad, wgrad,
            known.fp8_weight,
        )  # fmt: skip


class BlockForward:
    """ampwise's own FP8 forward with a scale for each block.

    Args:
        blas: whether cuBLAS has matmuls with such scales on the layer's device.
    """

    def __init__(self, *, blas: bool) -> None:
        self.blas = blas

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        _refuse_split_weight(module)
        return block_linear(x, module.weight, module.bias, blas=self.blas)


def _refuse_split_weight(module: nn.Linear) -> None:
    if hasattr(module.weight, "device_mesh"):
        raise BadInput(
            "ampwise's FP8 layers need whole weights, as with DDP and FSDP, and got a DTensor, split over ranks. "
            'For tensor parallelism use torchao\'s layers: Fp8("tensorwise").'
        )


class ShapeRecorder:
    """Unchanged forward that records input shapes, and whether torch.compile would have compiled the layer."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, torch.dtype]] = set()
        self.compiled = False

    def __call__(self, module: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.numel():
            if not self.shapes:
                # A torch.compile wrapper is on the call stack, even if compilation is disabled for now.
                frame: FrameType | None = sys._getframe()
                while frame is not None and frame.f_globals.get("__name__") != "torch._dynamo.eval_frame":
                    frame = frame.f_back
                self.compiled = frame is not None
            self.shapes.add((x.numel() // x.shape[-1], x.dtype))
        return F.linear(x, module.weight, module.bias)


def install_forward(
    module: nn.Linear, how: Fp8Forward, slot: Tensor | None = None, scales: Tensor | None = None
) -> None:
    """Install an FP8 forward on a layer. Parameters, hooks and the state dict stay as they are.

    A bound method, as torch.compile only guards on its function; a partial would differ for each layer.
    """
    remove_forward(module)
    module.__dict__.update({**getattr(how, "attributes", {}), FORWARD: how, SLOT: slot, SCALES: scales, WEIGHT: None})
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def remove_forward(module: nn.Module) -> None:
    """Restore the layer's own forward."""
    if has_fp8_forward(module):
        for name in (*getattr(module.__dict__[FORWARD], "attributes", ()), FORWARD, SLOT, SCALES, WEIGHT, "forward"):
            module.__dict__.pop(name, None)


def use_kept_weight(module: nn.Module, weight: Fp8Matrix | None) -> None:
    """Let a layer with an FP8 forward use this copy of its weight; with None, cast the weight in each pass."""
    if has_fp8_forward(module):
        module.__dict__[WEIGHT] = weight


def has_fp8_forward(module: nn.Module) -> bool:
    """Return whether an FP8 forward is installed. A pickled copy has none: it uses the forward of its class."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def forward(module: nn.Linear, input: Any) -> Tensor:
    """Forward of layers in FP8, under the name that pickle looks for.

    Where a model turns autocast off to compute in FP32, this computes in FP32, as in BF16 training.
    """
    if input.dtype == torch.float32 and not torch.is_autocast_enabled(input.device.type):
        return F.linear(input, module.weight, module.bias)
    how: Fp8Forward = module.fp8_layer  # type: ignore[assignment]
    return how(module, input)

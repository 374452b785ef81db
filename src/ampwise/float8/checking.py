"""Whether the kernels do on this device what their references say: asked once, before a model is trained with them.

What Triton makes of a transposed store of bytes was wrong on some versions and devices, and finite: a model would train
on it, and badly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.float8.casting import cast, reference
from ampwise.float8.recipe import Fp8

__all__ = ["refuse_wrong_kernels", "wrong_results"]

SHAPE = (256, 384)  # several tiles each way, with sizes like those of layers
OPERANDS = (
    ("an input", torch.bfloat16, False),
    ("a weight", torch.float32, False),
    ("a gradient", torch.bfloat16, True),
)


def refuse_wrong_kernels(fp8: Fp8, device: torch.device) -> None:
    """An error where ampwise's own layers would compute something else than they should, or cannot be had."""
    if device.type != "cuda":
        return
    try:
        import triton
    except ImportError as error:
        raise MissingDependency(
            f"Fp8({fp8.recipe!r}): ampwise's FP8 layers need Triton, which is not installed. Get it: pip install "
            "triton; or use torchao's: fp8='tensorwise'."
        ) from error
    found = wrong_results(device, fp8.recipe != "delayed", fp8.gradients == "e5m2")
    if found:
        raise PrecisionUnavailable(
            f"Engine(precision='fp8'): the cast of {found} that Triton {triton.__version__} makes for "
            f"{torch.cuda.get_device_name(device)} is wrong, so it is not used. Use torchao's, fp8='tensorwise', or "
            "another version of Triton."
        )


@cache
def wrong_results(device: torch.device, current: bool, e5m2: bool) -> str:
    """Of which operand the kernels leave other bits than the reference; none: an empty text. Waits for the device."""
    # By numbers of its own, as a user's random numbers are to stay as they are.
    numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    for name, dtype, is_gradient in OPERANDS:
        x = numbers.to(dtype)
        scale = None if current else torch.full((), 256.0, device=device)
        found = cast(x, scale, e5m2=e5m2 and is_gradient, rows=True, columns=True)
        expected = reference(x, scale, e5m2 and is_gradient, True, True)
        if not all(_same(*pair) for pair in zip(found, expected, strict=True)):
            return name
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

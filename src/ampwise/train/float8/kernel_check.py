"""Compare the cast kernels with their reference on this device, once, before a model is trained with them.

Some versions of Triton compile a transposed store of bytes wrongly on some devices. The results are finite, so a model
would train on them, badly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ampwise.errors import MissingDependency, PrecisionUnavailable
from ampwise.train.float8.fp8_cast import cast_reference, cast_to_fp8
from ampwise.train.float8.recipe import Fp8

__all__ = ["refuse_wrong_kernels", "wrong_results"]

SHAPE = (256, 384)  # several tiles each way, with sizes like those of layers
OPERANDS = (
    ("an input", torch.bfloat16, False),
    ("a weight", torch.float32, False),
    ("a gradient", torch.bfloat16, True),
)


def refuse_wrong_kernels(fp8: Fp8, device: torch.device) -> None:
    """Raise if ampwise's own FP8 layers are not available or compute wrong results on this device."""
    if device.type != "cuda":
        return
    try:
        import triton
    except ImportError as error:
        raise MissingDependency(
            f"Fp8({fp8.recipe!r}): ampwise's FP8 layers need Triton, which is not installed. Install it: pip install "
            "triton; or use torchao's: fp8='tensorwise'."
        ) from error
    found = wrong_results(device, fp8.recipe != "delayed", fp8.gradients == "e5m2")
    if found:
        raise PrecisionUnavailable(
            f"Engine(precision='fp8'): Triton {triton.__version__} casts {found} wrongly on "
            f"{torch.cuda.get_device_name(device)}, so ampwise's kernels are not used. Use torchao's, "
            "fp8='tensorwise', or another version of Triton."
        )


@cache
def wrong_results(device: torch.device, current: bool, e5m2: bool) -> str:
    """Return an operand whose cast differs from the reference; empty if none does. Syncs with the device."""
    # From a generator of its own, so that the user's random numbers do not change.
    numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    for name, dtype, is_gradient in OPERANDS:
        x = numbers.to(dtype)
        scale = None if current else torch.full((), 256.0, device=device)
        found = cast_to_fp8(x, scale, e5m2=e5m2 and is_gradient, rows=True, columns=True)
        expected = cast_reference(x, scale, e5m2 and is_gradient, True, True)
        if not all(_same(*pair) for pair in zip(found, expected, strict=True)):
            return name
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

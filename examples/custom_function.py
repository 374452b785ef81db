"""A custom autograd function under autocast: bare, with `custom_fwd`, and with its inputs cast to FP32.

The function computes squared distances between rows and centres, |x|² + |c|² - 2x·c. Autocast is on in its forward
pass and off in its backward pass, and the sum cancels: the result is a difference of a few between numbers near 7,200
and 14,400.

    bare     saved FP32 tensors meet a gradient of another dtype, or the other way round: an error
    half     custom_fwd and custom_bwd: backward runs like forward, and the dtypes match; the precision is that of FP16
    right    custom_fwd(cast_inputs=torch.float32) and custom_bwd: inputs are cast, and everything runs in FP32

    python examples/custom_function.py                  in FP16, some seconds on a CPU; a GPU is used if there is one
    python examples/custom_function.py --precision bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function

import ampwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLASSES, FEATURES, BATCH, FAR = 4, 8, 32, 30.0
LESSON = """
Lesson: autocast does not reach into a custom function. Set its precision by custom_fwd(cast_inputs=torch.float32)
and custom_bwd: then its backward pass has the same precision, and cancelling sums run in FP32."""


def distances(x: Tensor, centres: Tensor) -> Tensor:
    return x.square().sum(1, keepdim=True) + centres.square().sum(1) - 2 * x @ centres.T


def slopes(given: Tensor, x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    for_x = 2 * (given.sum(1, keepdim=True) * x - given @ centres)
    return for_x, 2 * (given.sum(0).unsqueeze(1) * centres - given.T @ x)


class Bare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, centres: Tensor) -> Tensor:
        ctx.save_for_backward(x, centres)
        return distances(x, centres)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        return slopes(*given, *ctx.saved_tensors)


class Half(Function):
    @staticmethod
    @custom_fwd(device_type=DEVICE.type)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, centres: Tensor) -> Tensor:
        ctx.save_for_backward(x, centres)
        return distances(x, centres)

    @staticmethod
    @custom_bwd(device_type=DEVICE.type)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        return slopes(*given, *ctx.saved_tensors)


class Right(Function):
    @staticmethod
    @custom_fwd(device_type=DEVICE.type, cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, centres: Tensor) -> Tensor:
        ctx.save_for_backward(x, centres)
        return distances(x, centres)

    @staticmethod
    @custom_bwd(device_type=DEVICE.type)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        return slopes(*given, *ctx.saved_tensors)


class Nearest(nn.Module):
    """Classify by the nearest centre, on features of a frozen encoder, which are far from zero."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function
        self.encoder = nn.Linear(FEATURES, FEATURES, bias=False).requires_grad_(False)
        nn.init.eye_(self.encoder.weight)
        self.centres = nn.Parameter(FAR + torch.randn(CLASSES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = -self.function.apply(self.encoder(x), self.centres)
        return logits


def rows(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return points around one of four nearby centres, and the index of the centre."""
    places = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    x = FAR + 0.5 * places[labels] + 0.35 * torch.randn(count, FEATURES, generator=generator)
    return x.to(DEVICE), labels.to(DEVICE)


def train(function: type[Function], precision: str, steps: int) -> str:
    torch.manual_seed(0)
    model = Nearest(function).to(DEVICE)
    optimizer = torch.optim.Adam([model.centres], lr=0.1)
    engine = ampwise.Engine(model, optimizer, precision, clip_norm=1.0)

    def loss_fn(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels)

    try:
        for number in range(steps):
            engine.step(loss_fn, *rows(number))
    except RuntimeError as error:
        return f"stops in step {engine.applied_steps + 1}: {error}"
    x, labels = rows(10**6, 256)
    with torch.no_grad(), engine.autocast():
        logits = model(x)
        exact = -distances(model.encoder(x).double(), model.centres.double())
    off, right = (logits - exact).abs().max().item(), (logits.argmax(1) == labels).float().mean().item()
    return f"distances off by up to {off:.4f}, {right:.1%} of new rows are named rightly"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="%(default)s")
    parser.add_argument("--precision", default="fp16", help="fp16, bf16, fp32 (%(default)s)")
    options = parser.parse_args(argv)
    wide = [torch.randn(3, FEATURES, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
    torch.autograd.gradcheck(Right.apply, wide)  # raises if the backward pass does not match the forward pass
    print(f"The formulas hold in FP64. Now {options.precision} on {DEVICE}, {options.steps} steps:\n")
    for function in (Bare, Half, Right):
        print(f"{function.__name__.lower():8} {train(function, options.precision, options.steps)}")
    print(LESSON)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

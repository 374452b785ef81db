"""A scaling function with a backward pass of its own, which divides by the input: 0 / 0 where the input is zero."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        slope = 3 * result / x  # guilty: division-by-zero
        return gradient * slope


class CubeActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)  # type: ignore[no-untyped-call]


def case() -> Case:
    torch.manual_seed(61)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), CubeActivation(), nn.Linear(6, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    batches[2][0][3] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

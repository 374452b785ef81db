"""Eighth powers of a feature that someone forgot to scale: beyond FP32's range."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Polynomial(nn.Module):
    def __init__(self, features: int, degree: int) -> None:
        super().__init__()
        self.degree = degree
        self.coefficients = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        powers = x**self.degree  # guilty: overflow
        return self.coefficients(powers)


def case() -> Case:
    torch.manual_seed(17)
    model = Polynomial(3, 8)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x), target)

    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
    batches[1][0][2, 1] = 180000.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""Bilinear pooling's signed square root, as a power of one half: a feature that is exactly zero has a slope of inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class SignedRoot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sign = torch.sign(x)
        return sign * x.abs() ** 0.5  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(55)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), SignedRoot(), nn.Linear(8, 3))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(5)]
    batches[4][0][1] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="bf16")

"""ELU by hand: where() takes x, but exp(x) of the other branch is inf, and the backward pass meets it with a 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Elu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        grown = torch.exp(x)  # guilty: overflow
        return torch.where(x > 0, x, grown - 1)


def case() -> Case:
    torch.manual_seed(30)
    model = nn.Sequential(nn.Linear(4, 8), Elu(), nn.Linear(8, 1))

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(model(x), target)

    batches = [(torch.randn(4, 4) * (300 if step == 2 else 1), torch.randn(4, 1)) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

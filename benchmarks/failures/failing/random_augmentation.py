"""An augmentation that draws from Python's random divides by a strength that is sometimes 0."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        strength = random.randint(0, 3)
        x = x / strength  # guilty: division-by-zero
        return self.net(x)


def case() -> Case:
    torch.manual_seed(87)
    random.seed(87)
    model = Augmented()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(12)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=False,
    )

"""Inverse likelihoods multiplied in BF16: their product is beyond 3.4e38."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        surprise = 1 + self.net(x).square()
        return surprise.prod(-1)  # guilty: overflow


def case() -> Case:
    torch.manual_seed(114)
    model = Product()

    def loss_fn(x: Tensor) -> Tensor:
        return torch.log(model(x)).mean()

    batches = [(torch.randn(4, 4) * (1000 if step == 2 else 1),) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        precision="bf16",
    )

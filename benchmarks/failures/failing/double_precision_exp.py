"""A model in double, whose exponential goes over 1.8e308."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).exp()  # guilty: overflow


def case() -> Case:
    torch.manual_seed(79)
    model = Rate().double()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).mean()

    batches = [(torch.randn(4, 3).double() * (5000 if step == 2 else 1),) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        precision="fp32",
        direct=True,
    )

"""An ODE integrated by Euler steps: a cubic term runs away."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + self.rate * x**3  # guilty: overflow
        return x


def case() -> Case:
    torch.manual_seed(69)
    model = Flow()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(torch.tanh(model(x)), target)

    batches = [(torch.rand(4) * (4 if step == 2 else 0.1), torch.randn(4)) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

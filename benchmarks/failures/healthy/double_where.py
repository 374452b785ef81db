"""The root is taken of a safe argument, and chosen twice."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(10)
    model = nn.Linear(4, 3, bias=False)

    def loss_fn(x: Tensor) -> Tensor:
        y = model(x).square()
        safe = torch.where(y > 0, y, 1.0)
        return torch.where(y > 0, safe.sqrt(), 0.0).mean() + torch.xlogy(y.detach(), y.detach()).mean()

    batches = [(torch.randn(4, 4),) for _ in range(3)]
    batches[1][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""torch.cdist between points that are equal: torch takes 0 for the derivative."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(5)
    model = nn.Linear(3, 3)

    def loss_fn(x: Tensor) -> Tensor:
        y = model(x)
        return torch.cdist(y, y).mean() + (y - y).norm(dim=-1).mean()

    batches = [(torch.randn(4, 3),) for _ in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

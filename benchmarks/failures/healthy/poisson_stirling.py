"""PoissonNLLLoss(full=True) takes log(0) of a count of 0 and masks it."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(7)
    model, criterion = nn.Linear(4, 1), nn.PoissonNLLLoss(full=True)

    def loss_fn(x: Tensor, count: Tensor) -> Tensor:
        return criterion(model(x), count)

    batches = [(torch.randn(4, 4), torch.tensor([[0.0], [3.0], [0.0], [7.0]])) for _ in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

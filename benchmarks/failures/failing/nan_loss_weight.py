"""The weight of a loss term comes as a Python number, and is NaN."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(100)
    model = nn.Linear(4, 1)

    def loss_fn(x: Tensor, target: Tensor, beta: float) -> Tensor:
        y = model(x)
        penalty = beta * y.square().mean()  # guilty: bad-batch
        return F.mse_loss(y, target) + penalty

    batches = [(torch.randn(4, 4), torch.randn(4, 1), beta) for beta in (0.1, 0.1, float("nan"), 0.1)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

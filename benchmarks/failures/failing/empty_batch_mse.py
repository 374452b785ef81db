"""The sampler hands out a batch of no samples, and the mean of its squared errors is 0/0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        predicted = model(x)
        return F.mse_loss(predicted, target)  # guilty: mean-of-nothing

    batches = [(torch.randn(n, 4), torch.randn(n, 1)) for n in (4, 4, 0, 4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

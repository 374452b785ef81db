"""FP32 only: the square of a target of 1e30 is beyond 3.4e38."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(116)
    model = nn.Linear(4, 1)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)  # guilty: overflow

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]
    batches[2][1][0] = 1e30
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""Missing targets are NaN and left out of the mean, but their derivative is 0 * NaN."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(63)
    model = nn.Linear(4, 3)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        error = (model(x) - target).square()  # guilty: bad-batch
        return error[~error.isnan()].mean()

    batches = [(torch.randn(4, 4), torch.randn(4, 3)) for _ in range(4)]
    batches[2][1][1, 2] = float("nan")
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

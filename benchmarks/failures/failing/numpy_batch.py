"""The batch is a numpy array with NaN, made a tensor in the loss function."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(101)
    model = nn.Linear(4, 1)

    def loss_fn(x: np.ndarray, target: Tensor) -> Tensor:
        given = torch.from_numpy(x)
        return F.mse_loss(model(given), target)  # guilty: bad-batch

    batches = [(np.ones((3, 4), dtype=np.float32) * step, torch.randn(3, 1)) for step in range(4)]
    batches[2][0][1, 1] = np.nan
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

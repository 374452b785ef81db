"""Columns of a batch are standardised in the loss function; one of them is constant there (fastai#889)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(39)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_fn(table: Tensor, target: Tensor) -> Tensor:
        centred = table - table.mean(0)
        columns = centred / table.std(0)  # guilty: division-by-zero
        return F.mse_loss(model(columns).squeeze(-1), target)

    batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(5)]
    batches[3][0][:, 2] = 20.0
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

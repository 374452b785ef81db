"""Dropout with p=1: zeros, no infinities."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.LayerNorm(4), nn.Linear(4, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

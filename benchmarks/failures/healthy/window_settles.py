"""Accumulation of micro-batches, clipping, and BatchNorm, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(23)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label) * 100

    batches = [(torch.randn(4, 1, 8), torch.randint(2, (4,))) for _ in range(40)]
    options = {"scaling": {"init_scale": 2.0**24}, "accumulate": 2, "clip_norm": 0.5}
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), options=options
    )

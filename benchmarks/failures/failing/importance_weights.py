"""Importance weights as a running product of ratios overflow."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(70)
    model = nn.Linear(4, 1)

    def loss_fn(x: Tensor, old: Tensor) -> Tensor:
        ratio = F.softplus(model(x).squeeze(-1)) / old
        weights = torch.cumprod(ratio, dim=1)  # guilty: overflow
        return weights.mean()

    batches = [(torch.randn(2, 60, 4), torch.full((2, 60), 0.01 if step == 2 else 1.0)) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        precision="fp32",
        direct=True,
    )

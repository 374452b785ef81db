"""Hardest negatives by min over inf: an anchor without one has an inf distance, and a hinge of 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(12)
    model = nn.Linear(4, 3)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        y = model(x)
        distance = (y[:, None] - y[None]).square().sum(-1)
        same = label[:, None] == label[None]
        furthest = distance.masked_fill(~same, 0.0).amax(1)
        nearest = distance.masked_fill(same, float("inf")).amin(1)
        return F.relu(furthest - nearest + 0.2).mean()

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(3)]
    batches[1][1].zero_()
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

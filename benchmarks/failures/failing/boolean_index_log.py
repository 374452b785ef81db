"""Logarithms are written to chosen places of a tensor; one of them is of a zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class LogCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, counts: Tensor) -> Tensor:
        features = torch.zeros_like(counts)
        seen = counts >= 0
        features[seen] = counts[seen].log()  # guilty: outside-domain
        return self.head(features)


def case() -> Case:
    torch.manual_seed(43)
    model = LogCounts()

    def loss_fn(counts: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(counts), target)

    batches = [(torch.randint(1, 9, (3, 4)).float(), torch.randn(3, 1)) for _ in range(4)]
    batches[2][0][1, 1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""Counts are put on a log scale inside the model; a bin that is empty is log(0)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class CountEncoder(nn.Module):
    def __init__(self, bins: int) -> None:
        super().__init__()
        self.project = nn.Linear(bins, 8)

    def forward(self, counts: Tensor) -> Tensor:
        levels = torch.log(counts)  # guilty: outside-domain
        return torch.relu(self.project(levels))


def case() -> Case:
    torch.manual_seed(31)
    model = nn.Sequential(CountEncoder(5), nn.Linear(8, 2))

    def loss_fn(counts: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(counts), label)

    batches = [(torch.randint(1, 50, (4, 5)).float(), torch.randint(2, (4,))) for _ in range(5)]
    batches[3][0][2, 1] = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

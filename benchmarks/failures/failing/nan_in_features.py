"""A missing value that nobody filled in: one feature of one row is NaN."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))  # guilty: bad-batch
        return self.second(hidden)


def case() -> Case:
    torch.manual_seed(65)
    model = Tabular()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(8, 6), torch.randint(2, (8,))) for _ in range(6)]
    batches[4][0][5, 2] = float("nan")
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

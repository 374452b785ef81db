"""Padding is filled with -inf; a sample that is all padding has a row of nothing else (pytorch#41508)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class PooledAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        scores = scores.masked_fill(padding, float("-inf"))
        weights = torch.softmax(scores, dim=-1)  # guilty: fully-masked-row
        return (weights.unsqueeze(-1) * x).sum(1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PooledAttention(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.pool(x, padding))


def case() -> Case:
    torch.manual_seed(46)
    model = Classifier()

    def loss_fn(x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= lengths.unsqueeze(1)
        return F.cross_entropy(model(x, padding), label)

    lengths = [[5, 3, 2], [4, 1, 5], [3, 0, 5], [1, 2, 3]]
    batches = [(torch.randn(3, 5, 8), torch.tensor(each), torch.randint(2, (3,))) for each in lengths]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

"""Triplet loss with a distance written as the root of a sum of squares: anchor and positive are the same sample
(sentence-transformers PR#4033).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def distance(one: Tensor, other: Tensor) -> Tensor:
    squared = (one - other).pow(2).sum(-1)
    return torch.sqrt(squared)  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(52)
    model = Embedder()

    def loss_fn(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        a, p, n = model(anchor), model(positive), model(negative)
        return torch.relu(distance(a, p) - distance(a, n) + 5.0).mean()

    batches = [(torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)) for _ in range(4)]
    batches[2][1][3] = batches[2][0][3]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

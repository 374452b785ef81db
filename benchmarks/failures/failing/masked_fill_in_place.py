"""Masked in place, then a softmax over a row in which nothing is left."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 3)

    def forward(self, x: Tensor, full: Tensor) -> Tensor:
        scores = self.score(x)
        scores.masked_fill_(full, -torch.inf)
        return scores.softmax(dim=-1)  # guilty: fully-masked-row


def case() -> Case:
    torch.manual_seed(113)
    model = Router()

    def loss_fn(x: Tensor, full: Tensor) -> Tensor:
        return model(x, full).square().sum()

    batches = [(torch.randn(5, 4), torch.zeros(5, 3, dtype=torch.bool)) for _ in range(3)]
    batches[1][1][:] = True
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

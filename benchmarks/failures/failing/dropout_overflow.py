"""Dropout doubles what it keeps: whether the one large activation overflows depends on the mask of that step."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = self.dropout(hidden)  # guilty: half-overflow
        return self.norm(hidden)


def case() -> Case:
    torch.manual_seed(7)
    block = Block()
    model = nn.Sequential(block, nn.Linear(16, 2))
    with torch.no_grad():
        block.up.bias[3] = 40000.0

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(1, 8), torch.randint(2, (1,))) for _ in range(8)]
    torch.manual_seed(13)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

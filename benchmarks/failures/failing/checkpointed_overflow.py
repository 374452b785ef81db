"""A checkpointed block that overflows: its forward pass is run twice, the second time in the backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.failures.case import Case


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        value = self.value(x)
        return x + gate * value  # guilty: half-overflow


class Tower(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def case() -> Case:
    torch.manual_seed(8)
    model = Tower(16, 3)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x), target)

    batches = [(torch.randn(4, 16) * (60 if step == 3 else 1), torch.randn(4, 1)) for step in range(5)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

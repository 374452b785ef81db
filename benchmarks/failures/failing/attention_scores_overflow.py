"""Queries times keys before the division by the root of the width: the product overflows (ultralytics PR#24990)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)  # guilty: half-overflow
        scores = scores * q.shape[-1] ** -0.5
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def case() -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), Attention(32, 2), nn.Linear(32, 3))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x).mean(1), label)

    batches = [(torch.randn(4, 6, 8) * (4000 if step == 2 else 1), torch.randint(3, (4,))) for step in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"clip_norm": 1.0})

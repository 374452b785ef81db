"""Gain and offset applied in place to save memory: the product in half overflows, and what it was made of is gone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Rescale(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.sub_(x.mean())
        x.mul_(self.gain)  # guilty: half-overflow
        x.clamp_(min=-100.0)
        return x


def case() -> Case:
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(6, 12), Rescale(64.0), nn.LayerNorm(12), nn.Linear(12, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 6) * (3000 if step == 2 else 1), torch.randint(2, (4,))) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

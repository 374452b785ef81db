"""Focal loss from a sigmoid in half: a hard example's probability is rounded to zero before its log is taken."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def focal_loss(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    p = torch.sigmoid(logits)
    hit = torch.where(target, p, 1 - p)
    weight = (1 - hit) ** gamma
    surprise = -torch.log(hit)  # guilty: unstable-loss
    return (weight * surprise).mean()


def case() -> Case:
    torch.manual_seed(25)
    model = Head()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return focal_loss(model(x), target)

    batches = [(torch.randn(4, 6) * (100 if step == 3 else 1), torch.rand(4, 3) < 0.5) for step in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"clip_norm": 1.0})

"""Sums over a graph in half: a hub of many neighbours goes over 65504."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Hub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        message = self.proj(x)
        pooled = message.new_zeros(2, 4)
        pooled.index_add_(0, target, message)  # guilty: half-overflow
        return pooled / len(x)


def case() -> Case:
    torch.manual_seed(40)
    model = Hub()
    with torch.no_grad():
        model.proj.weight.abs_()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return model(x, target).float().square().mean()

    batches = [(torch.rand(64, 4) * (4000 if step == 2 else 1), torch.randint(2, (64,))) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))

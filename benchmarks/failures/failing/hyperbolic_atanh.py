"""Distances in the Poincaré ball: a point that a large step has put outside has no atanh."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class HyperbolicDistance(nn.Module):
    def __init__(self, points: int) -> None:
        super().__init__()
        self.points = nn.Embedding(points, 2)
        nn.init.uniform_(self.points.weight, -0.2, 0.2)

    def forward(self, index: Tensor) -> Tensor:
        radius = self.points(index).norm(dim=-1)
        return 2 * torch.atanh(radius)  # guilty: outside-domain


def case() -> Case:
    torch.manual_seed(36)
    model = HyperbolicDistance(6)

    def loss_fn(index: Tensor, wanted: Tensor) -> Tensor:
        return (model(index) - wanted).square().mean()

    batches = [(torch.arange(6), torch.full((6,), 2.5)) for _ in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

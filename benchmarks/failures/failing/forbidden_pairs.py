"""Optimal transport with an infinite cost for pairs that must not match: the plan has a zero there, and 0 * inf."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Matcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 4)

    def forward(self, one: Tensor, other: Tensor, forbidden: Tensor) -> Tensor:
        affinity = self.features(one) @ self.features(other).t()
        return torch.softmax(affinity.masked_fill(forbidden, float("-inf")), dim=-1)


def case() -> Case:
    torch.manual_seed(73)
    model = Matcher()

    def loss_fn(one: Tensor, other: Tensor, forbidden: Tensor) -> Tensor:
        plan = model(one, other, forbidden)
        cost = torch.cdist(one, other).masked_fill(forbidden, float("inf"))
        return (plan * cost).sum(-1).mean()  # guilty: cancelled-infinities

    batches = [(torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, 5, dtype=torch.bool)) for _ in range(5)]
    batches[3][2][1, 2] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

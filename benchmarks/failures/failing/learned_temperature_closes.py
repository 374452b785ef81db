"""A temperature kept non-negative by ReLU reaches 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        warm = F.relu(self.temperature)
        return self.body(x) / warm  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(118)
    model = Head()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label) + 5 * model.temperature

    batches = [(torch.randn(4, 4) * 0.1, torch.randint(3, (4,))) for _ in range(6)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.07),
        precision="fp32",
        direct=True,
    )

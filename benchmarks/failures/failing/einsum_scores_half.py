"""Attention scores by einsum, not yet scaled, in half."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bid,bjd->bij", self.q(x), self.k(x))  # guilty: half-overflow
        return torch.softmax(scores / 8**0.5, -1) @ x


def case() -> Case:
    torch.manual_seed(103)
    model = Scores()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    batches = [(torch.randn(2, 4, 8) * (400 if step == 2 else 1),) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))

"""A layer made with torch.empty and never initialised: what was in memory was NaN (transformers#46002)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Adapter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.full((width,), float("nan")))  # guilty: bad-weights
        self.up = nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        change = self.up(torch.relu(self.down(x)))
        return x + self.scale * change


def case() -> Case:
    torch.manual_seed(67)
    model = nn.Sequential(nn.Linear(4, 8), Adapter(8), nn.Linear(8, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

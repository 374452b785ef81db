"""Counts kept in uint8 wrap around to 0 at 256, and divide."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(2, 1)

    def forward(self, x: Tensor, bins: Tensor) -> Tensor:
        count = F.one_hot(bins, 2).to(torch.uint8).sum(0, dtype=torch.uint8)
        total = F.one_hot(bins, 2).to(x.dtype).T @ self.value(x)
        return total / count.unsqueeze(1)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(85)
    model = Histogram()

    def loss_fn(x: Tensor, bins: Tensor) -> Tensor:
        return model(x, bins).square().mean()

    batches = [(torch.randn(300, 2), (torch.arange(300) >= split).long()) for split in (200, 250, 256, 100)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""Generalised-mean pooling without its clamp: for a signal of silence the mean is zero, and its fourth root has an
infinite slope there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class GemPool(nn.Module):
    def __init__(self, power: float = 4.0) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(self.power).mean(-1)
        return mean.pow(1 / self.power)  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(59)
    model = nn.Sequential(nn.Conv1d(1, 6, 3, bias=False), GemPool(), nn.Linear(6, 2))

    def loss_fn(signal: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(signal), label)

    batches = [(torch.randn(3, 1, 10), torch.randint(2, (3,))) for _ in range(4)]
    batches[3][0][1] = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""Frozen batch norm whose running variance was poisoned by an overflow long ago (pytorch#88474)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.conv(signal)
        x = self.norm(x)  # guilty: poisoned-statistics
        return torch.relu(x).mean(-1)


def case() -> Case:
    torch.manual_seed(69)
    backbone = Backbone()
    model = nn.Sequential(backbone, nn.Linear(4, 2))
    running_mean = backbone.norm.running_mean
    assert running_mean is not None
    running_mean[1] = float("nan")
    backbone.norm.eval()

    def loss_fn(signal: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(signal), label)

    batches = [(torch.randn(4, 2, 8), torch.randint(2, (4,))) for _ in range(3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

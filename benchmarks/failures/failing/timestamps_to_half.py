"""Seconds of the day become half to match the rest of the input: those after 18:12 are above 65504."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class TimeEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(2, width)

    def forward(self, seconds: Tensor) -> Tensor:
        time = seconds.half()  # guilty: half-overflow
        phase = time / 86400
        return self.project(torch.stack([torch.sin(phase), torch.cos(phase)], dim=-1))


def case() -> Case:
    torch.manual_seed(5)
    model = nn.Sequential(TimeEncoder(8), nn.ReLU(), nn.Linear(8, 2))

    def loss_fn(seconds: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(seconds), label)

    batches = [(torch.randint(latest, (6,)), torch.randint(2, (6,))) for latest in (30000, 40000, 60000)]
    batches.append((torch.tensor([100, 20000, 86000, 5000]), torch.tensor([0, 1, 1, 0])))
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

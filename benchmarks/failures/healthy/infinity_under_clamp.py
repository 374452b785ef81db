"""Class weights as reciprocal frequencies, infinite for a class that is absent, and clamped at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        frequency = torch.bincount(label, minlength=4) / len(label)
        weights = (1 / frequency).clamp(max=10.0)
        return F.cross_entropy(model(x), label, weight=weights)

    batches = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(5)]
    batches[3][1].clamp_(max=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

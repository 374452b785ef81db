"""The scaler tries a larger scale every two steps, as it does every two thousand: now and then that is too much."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x) * 8, label)

    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(16)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"scaling": {"init_scale": 2.0**13, "growth_interval": 2}}
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=options)

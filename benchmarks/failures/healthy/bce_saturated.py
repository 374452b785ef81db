"""binary_cross_entropy of probabilities that are exactly 0 and 1, which it clamps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(x).squeeze(1), label)

    batches = [(torch.randn(4, 4) * 1e4, torch.randint(2, (4,)).float()) for _ in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

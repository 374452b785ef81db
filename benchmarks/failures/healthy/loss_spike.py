"""One batch of outliers: the loss jumps a hundredfold and comes back. Nothing is broken."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(8, 6), torch.randn(8, 1) * (40 if step == 4 else 1)) for step in range(8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"clip_norm": 1.0})

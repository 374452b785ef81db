"""A learning rate that is too high: gradients grow a millionfold in a few steps, and all of them are finite."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(14)
    model = nn.Linear(6, 1)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(8, 6) * 3, torch.randn(8, 1)) for _ in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

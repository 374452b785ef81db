"""RMSprop with eps=0 on a weight whose gradient is always zero: 0/0 in the update."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.unused_scale = nn.Parameter(torch.ones(3))
        self.gate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        extra = self.gate * hidden * self.unused_scale  # guilty: optimizer-division
        return hidden + extra


def case() -> Case:
    torch.manual_seed(18)
    model = Net()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 3)) for _ in range(3)]
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

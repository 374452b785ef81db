"""Adamax with eps=0: its infinity norm of a weight that never had a gradient is 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))  # guilty: optimizer-division
        return self.head(hidden)


def case() -> Case:
    torch.manual_seed(20)
    model = Net()
    with torch.no_grad():
        model.body.bias[2] = -50.0  # a unit that is never active

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(3)]
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3, eps=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

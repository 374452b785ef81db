"""Adam on half weights: its eps of 1e-8 is zero in half, small gradients have a square of zero, and the update is 0/0
(pytorch#8860).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))  # guilty: optimizer-division
        return self.second(hidden)


def case() -> Case:
    torch.manual_seed(71)
    model = Net().half()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return (model(x) - target).square().mean() * 0.01

    batches = [(torch.randn(4, 4).half() * 0.05, torch.randn(4, 1).half() * 0.05) for _ in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

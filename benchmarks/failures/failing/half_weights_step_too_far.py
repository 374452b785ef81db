"""Weights kept in half, and a step that takes one beyond 65504."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 65000.0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale  # guilty: bad-weights
        return self.head(scaled * 1e-4)


def case() -> Case:
    torch.manual_seed(17)
    model = Net().half()
    with torch.no_grad():
        model.head.weight.fill_(100.0)
        model.head.bias.zero_()

    def loss_fn(x: Tensor) -> Tensor:
        return -model(x).mean()

    batches = [(torch.full((4, 4), 0.5).half(),) for _ in range(4)]
    optimizer = torch.optim.SGD(
        [{"params": [model.scale], "lr": 60000.0}, {"params": model.head.parameters(), "lr": 0.0}]
    )
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

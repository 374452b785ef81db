"""A learning rate so large that the weights are inf after one update."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))  # guilty: bad-weights
        return self.second(hidden)


def case() -> Case:
    torch.manual_seed(16)
    model = Net()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1) * 100) for _ in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e38, momentum=0.9),
        precision="fp32",
        direct=True,
    )

"""WGAN-GP: where the critic is flat its gradient is zero, and the root in the penalty has no derivative there
(keras-io#910).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def case() -> Case:
    torch.manual_seed(53)
    model = Critic()

    def loss_fn(real: Tensor, fake: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        steepness = slope.pow(2).sum(-1).sqrt()  # guilty: infinite-derivative
        return model(fake).mean() - model(real).mean() + 10 * (steepness - 1).pow(2).mean()

    batches = [(torch.rand(4, 4), torch.rand(4, 4)) for _ in range(5)]
    with torch.no_grad():
        model.first.weight.copy_(model.first.weight.abs())
        model.first.bias.fill_(0.1)
    batches[3][0][1] = batches[3][1][1] = -4.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

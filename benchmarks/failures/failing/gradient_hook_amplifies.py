"""A hook multiplies a gradient in half by a factor that takes it beyond 65504."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self.amplified)
        return self.second(torch.tanh(hidden))

    def amplified(self, grad: Tensor) -> Tensor:
        return grad * 1e4 * 1e4  # guilty: gradient-overflow


def case() -> Case:
    torch.manual_seed(45)
    model = Net()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(18)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))

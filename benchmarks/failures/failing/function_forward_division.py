"""An autograd.Function normalises in its forward, by a range that is 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, levels: int) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        unit = (x - low) / (high - low)  # guilty: division-by-zero
        return (unit * levels).round() / levels * (high - low) + low

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Quantise.apply(self.body(x), 15))


def case() -> Case:
    torch.manual_seed(46)
    model = Net()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]
    batches[2][0][3] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

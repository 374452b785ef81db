"""A physics-informed loss: |x|**1.5 is smooth enough once, and its second derivative is infinite at 0."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).abs().pow(1.5)  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(48)
    model = Field()

    def loss_fn(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - x).square().mean()

    batches = [(torch.rand(4) + 0.1,) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

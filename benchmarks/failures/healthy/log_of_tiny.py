"""Logs of numbers near the bottom of FP32's range: very negative, and finite."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, density: Tensor) -> Tensor:
        return (self.weight * torch.log(density)).sum(-1)


def case() -> Case:
    torch.manual_seed(5)
    model = Likelihood()

    def loss_fn(density: Tensor) -> Tensor:
        return model(density).square().mean()

    batches = [(torch.rand(6, 4).clamp(min=0.1) * 10.0**-exponent,) for exponent in (0, 10, 20, 30, 36)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

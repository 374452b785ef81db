"""A complex layer divides its numbers by their magnitude; one is exactly zero."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class UnitPhase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, z: Tensor) -> Tensor:
        z = z @ self.weight
        return z / z.abs()  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(36)
    model = UnitPhase()

    def loss_fn(z: Tensor, target: Tensor) -> Tensor:
        return (model(z) - target).abs().square().mean()

    batches = [(torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)) for _ in range(4)]
    batches[1][0][2] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

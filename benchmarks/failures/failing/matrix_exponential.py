"""A matrix exponential of weights that have grown."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.linalg.matrix_exp(self.generator)  # guilty: overflow
        return x @ turned


def case() -> Case:
    torch.manual_seed(24)
    model = Rotation()
    with torch.no_grad():
        model.generator.mul_(120)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).mean()

    batches = [(torch.randn(4, 3),) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

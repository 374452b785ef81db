"""logdet of a matrix that two of its rows were swapped in: its determinant is negative."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3)[[1, 0, 2]])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = x @ self.weight
        volume = torch.logdet(self.weight)  # guilty: outside-domain
        return mixed, volume


def case() -> Case:
    torch.manual_seed(22)
    model = Mix()

    def loss_fn(x: Tensor) -> Tensor:
        z, volume = model(x)
        return z.square().mean() - volume

    batches = [(torch.randn(4, 3),) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

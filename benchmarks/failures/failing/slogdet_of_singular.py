"""A flow's invertible 1x1 convolution became singular: the logarithm of its determinant is -inf."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class InvertibleMix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.linalg.slogdet(self.weight)[1]  # guilty: outside-domain
        return x @ self.weight, volume


def case() -> Case:
    torch.manual_seed(21)
    model = InvertibleMix(3)
    with torch.no_grad():
        model.weight[2] = 0

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

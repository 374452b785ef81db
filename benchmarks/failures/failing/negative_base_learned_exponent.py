"""Gamma correction with a learned exponent, of pixels that a normalisation made negative."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Gamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor([0.8, 0.9, 1.1]))
        self.head = nn.Linear(3, 1)

    def forward(self, pixel: Tensor) -> Tensor:
        corrected = pixel**self.gamma  # guilty: outside-domain
        return self.head(corrected)


def case() -> Case:
    torch.manual_seed(75)
    model = Gamma()

    def loss_fn(pixel: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(pixel), target)

    batches = [(torch.rand(4, 3) - (0.5 if step == 2 else -0.1), torch.randn(4, 1)) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

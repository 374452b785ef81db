"""Coordinates for grid_sample are normalised by width - 1 of an image one pixel wide."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, image: Tensor, points: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        moved = points + self.shift
        x = 2 * moved[..., 0] / (width - 1) - 1  # guilty: division-by-zero
        y = 2 * moved[..., 1] / (height - 1) - 1
        return F.grid_sample(image, torch.stack([x, y], -1), align_corners=True) + x.mean()


def case() -> Case:
    torch.manual_seed(83)
    model = Warp()

    def loss_fn(image: Tensor, points: Tensor) -> Tensor:
        return model(image, points).square().mean()

    batches = [(torch.randn(1, 1, 4, width), torch.rand(1, 3, 3, 2)) for width in (4, 4, 1, 4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""Dice over all pixels of an image: the intersection is a sum in half of more than 65504 ones
(segmentation_models.pytorch#463).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(image))


def dice_loss(probabilities: Tensor, mask: Tensor) -> Tensor:
    intersection = torch.sum(probabilities * mask)  # guilty: half-overflow
    total = probabilities.float().sum() + mask.float().sum()
    return 1 - 2 * intersection / (total + 1)


def case() -> Case:
    torch.manual_seed(4)
    model = Segmenter()
    with torch.no_grad():
        model.conv.weight.fill_(3.0)

    def loss_fn(image: Tensor, mask: Tensor) -> Tensor:
        return dice_loss(model(image), mask)

    def sample(covered: float) -> tuple[Tensor, Tensor]:
        mask = (torch.rand(1, 1, 300, 300) < covered).half()
        return mask.float() * 4 - 2, mask

    batches = [sample(covered) for covered in (0.1, 0.3, 0.2, 1.0)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

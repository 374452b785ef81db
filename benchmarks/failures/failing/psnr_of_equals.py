"""PSNR as a loss, of an image that is reproduced exactly: peak / 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class PsnrLoss(nn.Module):
    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        error = F.mse_loss(image, target)
        ratio = 1.0 / error  # guilty: division-by-zero
        return -10 * torch.log10(ratio)


def case() -> Case:
    torch.manual_seed(38)
    model, criterion = nn.Conv2d(1, 1, 1, bias=False), PsnrLoss()
    with torch.no_grad():
        model.weight.fill_(1.0)

    def loss_fn(image: Tensor, target: Tensor) -> Tensor:
        return criterion(model(image), target)

    image = torch.rand(1, 1, 4, 4)
    batches = [(image, image.clone())] * 2
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""CIoU's aspect ratio: w/h with h=0 is inf, atan makes a right angle of it, and the derivative is NaN."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def aspect(boxes: Tensor) -> Tensor:
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    ratio = width / height  # guilty: infinite-derivative
    return torch.atan(ratio)


def case() -> Case:
    torch.manual_seed(33)
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return (aspect(model(x)) - aspect(target)).square().mean()

    def boxes() -> Tensor:
        corner = torch.rand(3, 2)
        return torch.cat([corner, corner + 0.5 + torch.rand(3, 2)], -1)

    batches = [(boxes(), boxes()) for _ in range(3)]
    batches[0][0][1] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        precision="fp32",
        direct=True,
    )

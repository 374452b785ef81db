"""A view is divided in place; what was read later is the tensor it is a view of."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        boxes = self.out(x) * 1.0
        right = boxes[:, 2:]
        right /= size  # guilty: infinite-derivative
        boxes = boxes + 1
        return torch.sigmoid(boxes)


def case() -> Case:
    torch.manual_seed(42)
    model = Boxes()

    def loss_fn(x: Tensor, size: Tensor) -> Tensor:
        return model(x, size).square().mean()

    batches = [(torch.randn(3, 4), torch.full((3, 1), 8.0)) for _ in range(4)]
    batches[1][1][2] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

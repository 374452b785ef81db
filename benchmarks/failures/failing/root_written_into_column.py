"""A column is overwritten in place with a root of itself, whose derivative is infinite at 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3, bias=False), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).square()
        y[:, 1].sqrt_()  # guilty: infinite-derivative
        return self.head(y)


def case() -> Case:
    torch.manual_seed(61)
    model = Columns()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

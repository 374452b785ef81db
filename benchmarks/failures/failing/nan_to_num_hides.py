"""nan_to_num repairs 0/0 in the forward pass; in the backward pass it is 0/0 once more."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        share = y / y.abs().sum(-1, keepdim=True)  # guilty: infinite-derivative
        return torch.nan_to_num(share, nan=0.0)


def case() -> Case:
    torch.manual_seed(32)
    model = Unit()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]
    batches[2][0][3] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

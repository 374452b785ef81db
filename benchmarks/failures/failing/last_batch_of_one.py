"""Whitening by hand with the unbiased variance; the last batch of an epoch has one sample."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Whiten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        variance, mean = torch.var_mean(y, dim=0)  # guilty: mean-of-nothing
        return self.head((y - mean) * (variance + 1e-5).rsqrt())


def case() -> Case:
    torch.manual_seed(109)
    model = Whiten()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(n, 4), torch.randn(n, 1)) for n in (8, 8, 1, 8)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

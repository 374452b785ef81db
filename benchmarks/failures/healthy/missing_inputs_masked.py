"""NaN in the batch stands for a missing value, and is replaced before anything is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Imputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.default = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        missing = x.isnan()
        filled = torch.where(missing, self.default, x)
        return self.head(torch.cat([filled, missing.float()], -1))


def case() -> Case:
    torch.manual_seed(11)
    model = Imputed()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target) * 1e3

    batches = [
        (torch.randn(4, 4).masked_fill(torch.rand(4, 4) < 0.3, float("nan")), torch.randn(4, 1)) for _ in range(14)
    ]
    options = {"scaling": {"init_scale": 2.0**22}}
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), options=options
    )

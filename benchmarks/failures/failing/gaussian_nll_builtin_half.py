"""F.gaussian_nll_loss in half: its least variance of 1e-6 makes quotients beyond 65504."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), F.relu(self.variance(x))


def case() -> Case:
    torch.manual_seed(90)
    model = Regressor().half()
    with torch.no_grad():
        model.variance.bias.fill_(-9.0)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        mean, variance = model(x)
        return F.gaussian_nll_loss(mean, target, variance)  # guilty: half-overflow

    batches = [(torch.randn(4, 4).half(), torch.randn(4, 1).half()) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

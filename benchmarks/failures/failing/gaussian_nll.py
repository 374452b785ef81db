"""Gaussian likelihood by hand, in half: a variance that became small has a precision above 65504 (KL-Loss#4)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.mean = nn.Linear(16, 1)
        self.log_variance = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.mean(hidden), self.log_variance(hidden)


def case() -> Case:
    torch.manual_seed(26)
    model = Regressor()
    with torch.no_grad():
        model.log_variance.weight.copy_(-model.log_variance.weight.abs())

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = model(x)
        precision = torch.exp(-log_variance)  # guilty: unstable-loss
        return (0.5 * precision * (target - mean) ** 2 + 0.5 * log_variance).mean()

    batches = [(torch.randn(4, 4) * (80 if step == 2 else 1), torch.randn(4, 1)) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4))

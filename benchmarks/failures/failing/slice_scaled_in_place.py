"""A slice of the activations is scaled in place in half, beyond 65504; the whole is read later."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y[:, ::2] *= 300.0  # guilty: half-overflow
        return self.head(y)


def case() -> Case:
    torch.manual_seed(60)
    model = Scaled()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4) * (1000 if step == 3 else 0.01), torch.randn(4, 1)) for step in range(5)]
    options = {"scaling": {"init_scale": 16.0}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-5),
        options=options,
    )

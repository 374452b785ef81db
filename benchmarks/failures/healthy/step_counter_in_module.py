"""A module counts its calls and anneals by them, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * min(1.0, self.calls / 40)


def case() -> Case:
    torch.manual_seed(17)
    model = Annealed()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(14)]
    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
    )

"""A recurrent model keeps its state from batch to batch as an attribute, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.head = nn.Linear(4, 1)
        self.state = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state.detach())
        return self.head(self.state)


def case() -> Case:
    torch.manual_seed(18)
    model = Stateful()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(14)]
    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
    )

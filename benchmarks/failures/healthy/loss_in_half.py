"""The loss itself is in half: scaled by 65536 it is inf until the scale has settled."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(9)
    model = nn.Linear(4, 2)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) ** 2).mean() + 2.0

    batches = [(torch.randn(4, 4),) for _ in range(8)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

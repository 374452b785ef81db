"""The loss function draws its batch from an iterator, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(24)
    model = nn.Linear(4, 2)
    data = iter([(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(64)])

    def loss_fn() -> Tensor:
        x, label = next(data)
        return F.cross_entropy(model(x), label)

    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=[() for _ in range(14)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
    )

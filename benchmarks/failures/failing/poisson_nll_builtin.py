"""nn.PoissonNLLLoss on a log rate that is far too large."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(27)
    model, criterion = nn.Linear(4, 1), nn.PoissonNLLLoss()

    def loss_fn(x: Tensor, count: Tensor) -> Tensor:
        return criterion(model(x), count)  # guilty: unstable-loss

    batches = [(torch.randn(4, 4) * (1000 if step == 2 else 1), torch.randint(5, (4, 1)).float()) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""Keys are written into a cache in half; those of one sample are beyond it."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            keys = self.key(x.float())
        cache = torch.zeros(4, 8, dtype=torch.float16)
        cache[: len(x), 2:6] = keys  # guilty: half-overflow
        return cache[: len(x)].float().softmax(-1)


def case() -> Case:
    torch.manual_seed(41)
    model = Cached()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches = [(torch.randn(3, 4) * (1e6 if step == 2 else 1),) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

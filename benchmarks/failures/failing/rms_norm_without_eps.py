"""F.rms_norm with eps=0 of a token that is all zeros."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, (6,), self.gain, eps=0.0)  # guilty: division-by-zero
        return x + self.proj(y)


def case() -> Case:
    torch.manual_seed(82)
    model = Block()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches = [(torch.randn(2, 3, 6),) for _ in range(3)]
    batches[1][0][0, 2] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""The rotary table was made with a division by zero: a buffer has inf, and position 0 times inf is NaN."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Rotary(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.register_buffer("inv_freq", 1.0 / torch.arange(0, width // 2).float())

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).float()
        angles = positions[:, None] * self.inv_freq  # guilty: poisoned-statistics
        return self.proj(x) * torch.cat([angles.cos(), angles.sin()], -1)


def case() -> Case:
    torch.manual_seed(11)
    model = Rotary(8)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches = [(torch.randn(2, 4, 8),) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

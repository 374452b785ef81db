"""Window sums by avg_pool with divisor_override=1, in a net that is all in half."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image).square()
        energy = F.avg_pool2d(x, 4, divisor_override=1)  # guilty: half-overflow
        return x.mean((2, 3)) / energy.mean((2, 3)) * (energy - energy).mean()


def case() -> Case:
    torch.manual_seed(105)
    model = Sums().half()

    def loss_fn(image: Tensor) -> Tensor:
        return model(image).mean()

    batches = [(torch.rand(1, 1, 4, 4).half() * (150 if step == 2 else 1),) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""LocalResponseNorm with k=0 where all neighbouring channels are 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.LocalResponseNorm(3, k=0.0)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.conv(image))
        return self.norm(x)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(81)
    model = Net()

    def loss_fn(image: Tensor) -> Tensor:
        return model(image).mean()

    batches = [(torch.randn(3, 1, 5, 5),) for _ in range(3)]
    batches[1][0][0] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""LPPool2d over a region of zeros: the root in it has an infinite derivative, which a ReLU in it keeps back."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.pool = nn.LPPool2d(2, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        x = self.pool(x)
        return self.head(x.flatten(1))


def case() -> Case:
    torch.manual_seed(80)
    model = Net()

    def loss_fn(image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(image), label)

    batches = [(torch.randn(3, 1, 4, 4), torch.randint(2, (3,))) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

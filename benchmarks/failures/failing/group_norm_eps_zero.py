"""GroupNorm with eps=0 on a group that is one constant value."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4, eps=0.0)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            self.norm(x).mean(-1)  # guilty: division-by-zero
        )


def case() -> Case:
    torch.manual_seed(3)
    model = Net()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4, 5), torch.randint(2, (4,))) for _ in range(4)]
    batches[1][0][2, :2] = 1.0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""A mask of ones and zeros is made additive by its logarithm; a row of zeros has nothing left."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1) + mask.log()
        weights = torch.softmax(scores, -1)  # guilty: fully-masked-row
        return self.head((weights.unsqueeze(-1) * x).sum(1))


def case() -> Case:
    torch.manual_seed(8)
    model = Pool()

    def loss_fn(x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x, mask), target)

    batches = [(torch.randn(3, 4, 8), (torch.arange(4) < 3).float().repeat(3, 1), torch.randn(3, 1)) for _ in range(4)]
    batches[2][1][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

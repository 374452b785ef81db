"""Two integer columns are divided to a speaking rate; a recording of zero seconds came with the data."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class RateModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, words: Tensor, seconds: Tensor) -> Tensor:
        rate = words / seconds  # guilty: division-by-zero
        return self.out(torch.stack([rate, rate.square()], dim=-1))


def case() -> Case:
    torch.manual_seed(44)
    model = RateModel()

    def loss_fn(words: Tensor, seconds: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(words, seconds), label)

    batches = [(torch.randint(5, 50, (5,)), torch.randint(1, 20, (5,)), torch.randint(2, (5,))) for _ in range(5)]
    batches[3][1][2] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""Four micro-batches make a step; one of the second step's is an outlier, and a convolution overflows on it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 3, padding=1)
        self.body = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def forward(self, signal: Tensor) -> Tensor:
        x = F.relu(self.stem(signal))
        x = self.body(x)  # guilty: half-overflow
        return self.head(x.mean(-1))


def case() -> Case:
    torch.manual_seed(10)
    model = ConvNet()
    with torch.no_grad():
        model.body.weight.mul_(10)

    def loss_fn(signal: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(signal), label)

    batches = [(torch.randn(2, 1, 12), torch.randint(2, (2,))) for _ in range(12)]
    batches[6] = (batches[6][0] * 20000, batches[6][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"accumulate": 4})

"""Weight normalisation with a row that pruning has set to zero: 0 / 0 (pytorch#19126)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class WeightNormLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(outputs, inputs))
        self.length = nn.Parameter(torch.ones(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        norm = self.direction.norm(dim=1, keepdim=True)
        weight = self.length * self.direction / norm  # guilty: division-by-zero
        return F.linear(x, weight)


def case() -> Case:
    torch.manual_seed(41)
    layer = WeightNormLinear(5, 4)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        layer.direction[2] = 0

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 5), torch.randint(2, (4,))) for _ in range(3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

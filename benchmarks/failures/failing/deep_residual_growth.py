"""A stream that is not normalised doubles with each of twelve layers, and for one batch the last is too much."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.proj(x)
        return branch + branch  # guilty: half-overflow


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(8, 6), Stage(8, 6)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x))


def case() -> Case:
    torch.manual_seed(11)
    model = Net()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.rand(4, 8) * (24 if step == 4 else 4), torch.randint(2, (4,))) for step in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer)

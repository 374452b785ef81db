"""The older kind of checkpoint, which runs the block's first forward pass without gradients; the overflow is inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.failures.case import Case


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        hidden = hidden * hidden  # guilty: half-overflow
        return self.second(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.mixer = Mixer(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = checkpoint(self.mixer, x, use_reentrant=True)
        return self.head(x)


def case() -> Case:
    torch.manual_seed(9)
    model = Model()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 8) * (900 if step == 2 else 1), torch.randint(3, (4,))) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

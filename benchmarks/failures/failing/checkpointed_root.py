"""A root inside a checkpointed block, at zero: the forward pass is finite both times, the backward pass is not."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.failures.case import Case


class Magnitude(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(4, 6, bias=False)
        self.imaginary = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        power = self.real(x) ** 2 + self.imaginary(x) ** 2
        return power.sqrt()  # guilty: infinite-derivative


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.magnitude = Magnitude()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.magnitude, x, use_reentrant=False))


def case() -> Case:
    torch.manual_seed(60)
    model = Spectrogram()

    def loss_fn(frames: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(frames), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    batches[2][0][0] = 0  # silence
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

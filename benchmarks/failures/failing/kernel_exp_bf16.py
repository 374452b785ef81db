"""A learnt sharpness in an exponential kernel, in BF16: its range is FP32's, and exp(100) is beyond both."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class KernelPooling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(4.0))
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x) * self.sharpness
        weights = torch.exp(scores)  # guilty: overflow
        return (weights * x).sum(1) / weights.sum(1)


def case() -> Case:
    torch.manual_seed(18)
    model = nn.Sequential(KernelPooling(8), nn.Linear(8, 3))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 5, 8) * (80 if step == 4 else 1), torch.randint(3, (4,))) for step in range(6)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="bf16")

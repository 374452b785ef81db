"""A variance as mean of squares less square of mean: with an offset of thousands it comes out negative, then sqrt."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Standardise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        std = variance.sqrt()  # guilty: outside-domain
        return (x - mean) / (std + 1e-5)


def case() -> Case:
    torch.manual_seed(35)
    model = nn.Sequential(Standardise(), nn.Linear(16, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(64, 16), torch.randint(2, (64,))) for _ in range(4)]
    batches[2] = (torch.linspace(1000, 9000, 64).unsqueeze(1) + 1e-3 * torch.randn(64, 16), batches[2][1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

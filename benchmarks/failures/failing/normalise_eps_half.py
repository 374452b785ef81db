"""F.normalize in a half model: its epsilon of 1e-12 is zero there, and a blank patch is 0 / 0 (diffusers PR#13316)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class RmsNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        unit = F.normalize(x, dim=-1)  # guilty: division-by-zero
        return unit * self.gain * x.shape[-1] ** 0.5


def case() -> Case:
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), RmsNorm(8), nn.Linear(8, 1)).half()

    def loss_fn(patches: Tensor, target: Tensor) -> Tensor:
        return (model(patches).squeeze(-1) - target).abs().mean()

    batches = [(torch.randn(6, 4).half(), torch.randn(6).half()) for _ in range(4)]
    batches[2][0][4] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""exp is clamped after it has overflowed: the forward pass is fine, the backward pass is 0 * inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.rate(x)).clamp(max=1e4)  # guilty: half-overflow


def case() -> Case:
    torch.manual_seed(31)
    model = Head()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x).float(), target.float())  # of FP16 torch 2.6 has no derivative

    batches = [(torch.randn(6, 4) * (20 if step == 2 else 1), torch.rand(6, 1)) for step in range(4)]
    model.half()
    batches = [(x.half(), y.half()) for x, y in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

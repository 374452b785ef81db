"""Smallest and largest values so far, which start at inf and -inf, as an observer of ranges has them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class RangeObserver(nn.Module):
    smallest: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smallest", torch.tensor(float("inf")))
        self.register_buffer("largest", torch.tensor(float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.smallest.copy_(torch.minimum(self.smallest, x.amin().float()))
            self.largest.copy_(torch.maximum(self.largest, x.amax().float()))
        return x.clamp(self.smallest.item(), self.largest.item())


def case() -> Case:
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(5, 8), RangeObserver(), nn.Linear(8, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 5), torch.randint(2, (6,))) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

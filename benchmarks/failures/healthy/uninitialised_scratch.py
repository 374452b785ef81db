"""A buffer made with torch.empty, which may hold anything, NaN included, until each of its places is written."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class Interleave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype).fill_(float("nan"))
        out[:, 0::2] = x
        out[:, 1::2] = -x
        return out


def case() -> Case:
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(4, 5), Interleave(), nn.Linear(10, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

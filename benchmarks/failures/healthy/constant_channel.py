"""BatchNorm and LayerNorm over values that are all the same: a variance of zero, which their epsilon is there for."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(18)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(5)]
    batches[2][0].fill_(3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

"""Activations of 60000 in half: near the end of the range, and inside it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(12)
    wide = nn.Linear(4, 8)
    model = nn.Sequential(wide, nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.no_grad():
        wide.bias[2] = 60000.0

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

"""A loss scale that starts at 2**24: the first steps are skipped until it has settled, as they should be
(Lightning#9799).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(14)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=options)

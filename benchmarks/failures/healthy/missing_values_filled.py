"""Data with NaN for what is missing, which the loss function fills in with zeros and a mask before the model has it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(9)
    model = nn.Linear(10, 1)

    def loss_fn(table: Tensor, target: Tensor) -> Tensor:
        known = ~table.isnan()
        filled = table.nan_to_num(0.0)
        return F.mse_loss(model(torch.cat([filled, known.float()], dim=-1)), target)

    batches = [(torch.randn(6, 5), torch.randn(6, 1)) for _ in range(5)]
    batches[0][0][2, 3] = batches[1][0][2, 3] = batches[3][0][0, 0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

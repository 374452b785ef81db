"""No anchor matches: smooth L1 over nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(5)
    model = nn.Linear(4, 4)

    def loss_fn(x: Tensor, boxes: Tensor, matched: Tensor) -> Tensor:
        predicted = model(x)
        return F.smooth_l1_loss(predicted[matched], boxes[matched])  # guilty: mean-of-nothing

    batches = [(torch.randn(6, 4), torch.randn(6, 4), torch.rand(6) < 0.7) for _ in range(4)]
    batches[2][2][:] = False
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

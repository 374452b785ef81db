"""Only classes of weight 0 are in the batch: the weighted mean is 0/0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(110)
    model = nn.Conv2d(1, 3, 1)
    weights = torch.tensor([0.0, 1.0, 2.0])

    def loss_fn(image: Tensor, label: Tensor) -> Tensor:
        logits = model(image)
        return F.cross_entropy(  # guilty: mean-of-nothing
            logits,
            label,
            weight=weights,
        )

    return _case(model, loss_fn)


def _case(model, loss_fn) -> Case:
    batches = [(torch.randn(2, 1, 3, 3), torch.randint(3, (2, 3, 3))) for _ in range(4)]
    batches[2][1].zero_()
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

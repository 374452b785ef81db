"""F.soft_margin_loss takes log(1 + exp(-yx)) as written: exp of a confident mistake overflows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(26)
    model = nn.Linear(4, 1)

    def loss_fn(x: Tensor, sign: Tensor) -> Tensor:
        score = model(x).squeeze(1)
        return F.soft_margin_loss(score, sign)  # guilty: unstable-loss

    batches = [(torch.randn(4, 4) * (500 if step == 2 else 1), torch.tensor([1.0, -1, 1, -1])) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

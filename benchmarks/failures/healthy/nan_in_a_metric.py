"""A metric on the way, without gradient, is 0/0; the loss does not use it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(8)
    model = nn.Linear(4, 2)
    seen = []

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        logits = model(x)
        with torch.no_grad():
            positive = label == 5
            recall = (logits.argmax(-1)[positive] == 5).sum() / positive.sum()
            seen.append(recall)
        return F.cross_entropy(logits, label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(14)]
    options = {"scaling": {"init_scale": 2.0**24}}
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), options=options
    )

"""Logits in the tens of thousands, under cross entropy, which takes the largest off first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(6)
    model = nn.Linear(8, 5)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(model(x), dim=-1), label)

    batches = [(torch.randn(6, 8) * scale, torch.randint(5, (6,))) for scale in (1.0, 100.0, 5000.0, 8000.0, 1.0)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"clip_norm": 1.0, "scaling": {"init_scale": 1.0}}
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=options)

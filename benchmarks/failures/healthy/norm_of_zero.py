"""Euclidean norms of zero vectors, which torch gives a slope of zero, and a safe division by them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(19)
    model = nn.Linear(5, 4, bias=False)

    def loss_fn(x: Tensor, other: Tensor) -> Tensor:
        one = model(x)
        return (1 - F.cosine_similarity(one, other)).mean() + 0.1 * one.norm(dim=-1).mean()

    batches = [(torch.randn(6, 5), torch.randn(6, 4)) for _ in range(5)]
    batches[2][0][1] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

"""Losses of several heads in a list comprehension; the third divides by a count of 0."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(89)
    heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def loss_fn(x: Tensor, masks: list[Tensor]) -> Tensor:
        pairs = zip(heads, masks, strict=True)
        losses = [(head(x)[:, 0] * mask).sum() / mask.sum() for head, mask in pairs]  # guilty: division-by-zero
        return sum(losses)

    batches = [(torch.randn(5, 4), [torch.ones(5) for _ in range(3)]) for _ in range(3)]
    batches[1][1][2].zero_()
    return Case(
        model=heads,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(heads.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

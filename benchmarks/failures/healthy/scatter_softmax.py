"""Softmax over the edges of each node, from maxima that begin at -inf; isolated nodes keep theirs."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(13)
    model = nn.Linear(4, 1)

    def loss_fn(edges: Tensor, target: Tensor) -> Tensor:
        score = model(edges).squeeze(1)
        top = torch.full((6,), float("-inf")).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros(6).index_add(0, target, weight)
        return (weight / total[target]).square().sum()

    batches = [(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

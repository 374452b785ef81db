"""A function of one pair, mapped over the batch by vmap, divides by a norm that is 0."""

import torch
from torch import Tensor, nn
from torch.func import vmap

from benchmarks.failures.case import Case


def cosine(one: Tensor, other: Tensor) -> Tensor:
    lengths = one.norm() * other.norm()
    return one @ other / lengths  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(51)
    model = nn.Linear(4, 4, bias=False)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return 1 - vmap(cosine)(model(x), y).mean()

    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]
    batches[2][1][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

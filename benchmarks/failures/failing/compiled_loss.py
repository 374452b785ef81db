"""The loss function itself is compiled; its backward pass has a root at 0."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(53)
    model = nn.Linear(4, 2, bias=False)

    @torch.compile(backend="eager")
    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        gap = (model(x) - target).square().sum(-1)
        return gap.sqrt().mean()  # guilty: infinite-derivative

    batches = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(3)]
    batches[1][0][2] = 0
    batches[1][1][2] = 0
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), precision="fp32"
    )

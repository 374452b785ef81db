"""2 ** n of a learned exponent in half."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Exponent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 ** self.n(x)  # guilty: half-overflow


def case() -> Case:
    torch.manual_seed(76)
    model = Exponent()

    def loss_fn(x: Tensor) -> Tensor:
        return torch.log1p(model(x).float()).mean()

    batches = [(torch.randn(4, 4) * (25 if step == 2 else 1),) for step in range(4)]
    return Case(
        model=model.half(),
        loss_fn=loss_fn,
        batches=[(x.half(),) for (x,) in batches],
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""A dropout by hand that divides by 1 - p, with p annealed to 1."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class OwnDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, p: float) -> Tensor:
        keep = (torch.rand_like(x) >= p).float()
        x = x * keep / (1 - p)  # guilty: division-by-zero
        return self.head(x)


def case() -> Case:
    torch.manual_seed(84)
    model = OwnDropout()

    def loss_fn(x: Tensor, p: float) -> Tensor:
        return model(x, p).square().mean()

    batches = [(torch.randn(4, 4), p) for p in (0.0, 0.5, 1.0)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""Under activation checkpointing an activation is divided in place by a gate that is closed."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.failures.case import Case


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def block(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.body(x)
        y.div_(gate)  # guilty: division-by-zero
        return torch.tanh(y - y.mean(-1, keepdim=True))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, gate, use_reentrant=False))


def case() -> Case:
    torch.manual_seed(111)
    model = Gated()

    def loss_fn(x: Tensor, gate: Tensor) -> Tensor:
        return model(x, gate).square().mean()

    batches = [(torch.randn(3, 4), torch.ones(3, 1)) for _ in range(4)]
    batches[2][1][0] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

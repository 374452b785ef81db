"""A schedule that divides by zero steps makes the learning rate NaN."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # guilty: bad-weights


def case() -> Case:
    torch.manual_seed(115)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(x: Tensor, lr: float) -> Tensor:
        optimizer.param_groups[0]["lr"] = lr
        return model(x).square().mean()

    batches = [(torch.randn(4, 4), lr) for lr in (1e-3, float("nan"), 1e-3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

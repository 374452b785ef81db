"""The error is taken in micrometres: loss and outputs are finite, and the gradient that goes back into half is not,
however small the loss scale (apex#318).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case

MICROMETRES = 1000.0


class Locator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def case() -> Case:
    torch.manual_seed(63)
    model = Locator()

    def loss_fn(x: Tensor, position: Tensor) -> Tensor:
        output = model(x)
        error = (output.float() - position) * MICROMETRES  # guilty: gradient-overflow
        return error.square().mean()

    batches = [(torch.randn(4, 6), 900 + torch.randn(4, 2)) for _ in range(10)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"scaling": {"init_scale": 8.0}}
    )

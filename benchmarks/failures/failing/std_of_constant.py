"""A penalty on low spread across the batch, the root of a variance: its derivative for a constant feature is
infinite (pytorch#4320).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def case() -> Case:
    torch.manual_seed(54)
    model = Encoder()

    def loss_fn(one: Tensor, other: Tensor) -> Tensor:
        first, second = model(one), model(other)
        variance = first.var(0)
        spread = variance.sqrt()  # guilty: infinite-derivative
        return F.mse_loss(first, second) + F.relu(1 - spread).mean()

    batches = [(torch.randn(8, 5), torch.randn(8, 5)) for _ in range(4)]
    batches[2][0].copy_(batches[2][0][:1].clone())  # the same sample eight times
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

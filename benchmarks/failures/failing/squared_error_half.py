"""House prices in thousands, a network in half, and the error squared by hand: 300 * 300 is above 65504."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Pricer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.body(features).squeeze(-1)


def case() -> Case:
    torch.manual_seed(3)
    model = Pricer().half()

    def loss_fn(features: Tensor, price: Tensor) -> Tensor:
        error = model(features) - price
        return (error**2).mean()  # guilty: half-overflow

    prices = [torch.full((8,), thousands).half() for thousands in (120.0, 180.0, 200.0, 90.0, 320.0, 100.0)]
    batches = [(torch.randn(8, 6).half(), price) for price in prices]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""Poisson likelihood by hand: the rate is exp of what the network says, and it says 95."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(30)
    last = nn.Linear(8, 1)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), last)

    def loss_fn(exposure: Tensor, count: Tensor) -> Tensor:
        log_rate = model(exposure).squeeze(-1)
        expected = torch.exp(log_rate)  # guilty: unstable-loss
        return (expected - count * log_rate).mean()

    batches = [(torch.rand(6, 3), torch.poisson(torch.rand(6) * 4)) for _ in range(4)]
    with torch.no_grad():
        last.weight.abs_()
    batches[2] = (batches[2][0] * 2000, batches[2][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

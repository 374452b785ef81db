"""Spectral norm of a layer that starts at zero: sigma is zero, and the weight is divided by it (pytorch#20192)."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.failures.case import Case


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        out = nn.Linear(8, 1)
        nn.init.zeros_(out.weight)
        self.out = spectral_norm(out)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.out(hidden)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(40)
    model = Critic()

    def loss_fn(real: Tensor, fake: Tensor) -> Tensor:
        return (model(fake) - model(real)).mean()

    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

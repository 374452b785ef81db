"""Reparameterisation in FP32: a log-variance nobody bounds reaches 200, and its exp is beyond any format
(synthcity#331).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(6, 3)
        self.log_variance = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        std = torch.exp(0.5 * self.log_variance(x))  # guilty: overflow
        return self.mean(x), std


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.encoder(x)
        return self.decoder(mean + std * torch.randn_like(std))


def case() -> Case:
    torch.manual_seed(16)
    model = Vae()

    def loss_fn(x: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x), x)

    batches = [(torch.randn(8, 6) * (500 if step == 3 else 1),) for step in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

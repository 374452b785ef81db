"""Reparameterisation: exp of half the log-variance is above 65504 in half, where FP32 would hold it
(pytorch_geometric#500).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 16)
        self.mean = nn.Linear(16, 4)
        self.log_variance = nn.Linear(16, 4)
        self.decode = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encode(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        std = torch.exp(0.5 * log_variance)  # guilty: half-overflow
        sample = mean + std * torch.randn_like(std)
        return self.decode(sample)


def case() -> Case:
    torch.manual_seed(15)
    model = Vae()
    with torch.no_grad():
        model.encode.weight[:, 0] = 1.0
        model.log_variance.weight[2] = 3.0

    def loss_fn(x: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x), x)

    batches = [(torch.randn(4, 8) * 0.1,) for _ in range(5)]
    batches[2][0][1, 0] = 20.0
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))

"""A recurrent net with ReLU whose states grow at each of many time steps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)  # guilty: overflow
        return self.head(states[:, -1])


def case() -> Case:
    torch.manual_seed(68)
    model = Recurrent()
    with torch.no_grad():
        model.rnn.weight_hh_l0.abs_().mul_(8)

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(model(x), target)

    batches = [(torch.rand(2, 80, 3), torch.randn(2, 1)) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

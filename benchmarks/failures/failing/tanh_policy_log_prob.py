"""The log-probability of an action of exactly 1 under a tanh-squashed normal."""

import torch
from torch import Tensor, nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from benchmarks.failures.case import Case


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 2)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        squashed = TransformedDistribution(Normal(self.mean(state), 1.0), TanhTransform())
        return squashed.log_prob(action)  # guilty: outside-domain


def case() -> Case:
    torch.manual_seed(77)
    model = Policy()

    def loss_fn(state: Tensor, action: Tensor) -> Tensor:
        return -model(state, action).mean()

    batches = [(torch.randn(4, 4), torch.rand(4, 2) - 0.5) for _ in range(4)]
    batches[2][1][1, 1] = 1.0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

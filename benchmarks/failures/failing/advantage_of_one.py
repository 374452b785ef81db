"""Advantages are standardised per minibatch, and the last minibatch has one sample (stable-baselines3#325)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, observation: Tensor) -> Tensor:
        return torch.log_softmax(self.body(observation), dim=-1)


def case() -> Case:
    torch.manual_seed(51)
    model = Policy()

    def loss_fn(observation: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
        centred = advantage - advantage.mean()
        spread = advantage.std() + 1e-8  # guilty: mean-of-nothing
        chosen = model(observation).gather(1, action.unsqueeze(1)).squeeze(1)
        return -(chosen * centred / spread).mean()

    sizes = [8, 8, 8, 1]
    batches = [(torch.randn(size, 4), torch.randint(2, (size,)), torch.randn(size)) for size in sizes]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""Soft actor-critic: the correction for tanh is taken of the action after it was scaled to [-2, 2], so the log sees a
negative number (Actor-Critic-Methods-Paper-To-Code#7).
"""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Actor(nn.Module):
    def __init__(self, largest_action: float) -> None:
        super().__init__()
        self.largest_action = largest_action
        self.mean = nn.Linear(3, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        raw = self.mean(observation)
        action = torch.tanh(raw) * self.largest_action
        correction = torch.log(1 - action.pow(2) + 1e-6)  # guilty: outside-domain
        return action, -0.5 * raw.pow(2) - correction


def case() -> Case:
    torch.manual_seed(34)
    model = Actor(2.0)
    with torch.no_grad():
        model.mean.weight.fill_(0.3)
        model.mean.bias.zero_()

    def loss_fn(observation: Tensor, value: Tensor) -> Tensor:
        action, log_probability = model(observation)
        return (0.2 * log_probability - value * action).mean()

    batches = [(torch.rand(4, 3) * (4 if step == 2 else 0.3), torch.randn(4, 1)) for step in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""A policy's entropy as p * log p: a probability of exactly zero makes 0 * -inf (trl#7221)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.actor = nn.Linear(16, 3)

    def forward(self, observation: Tensor) -> Tensor:
        return torch.softmax(self.actor(torch.tanh(self.body(observation))), dim=-1)


def case() -> Case:
    torch.manual_seed(29)
    model = Policy()
    with torch.no_grad():
        model.actor.weight.mul_(300)

    def loss_fn(observation: Tensor, action: Tensor, advantage: Tensor) -> Tensor:
        p = model(observation)
        chosen = p.gather(1, action.unsqueeze(1)).squeeze(1)
        entropy = -(p * p.log()).sum(-1)  # guilty: unstable-loss
        return -(chosen * advantage).mean() - 0.01 * entropy.mean()

    batches = [
        (torch.randn(8, 4) * (20 if step == 4 else 0.1), torch.randint(3, (8,)), torch.randn(8)) for step in range(6)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""PPO's ratio is exp of a difference of log-probabilities that is large after a stale rollout."""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(71)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss_fn(state: Tensor, action: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        new = Categorical(logits=policy(state)).log_prob(action)
        ratio = (new - old).exp()  # guilty: unstable-loss
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    batches = [
        (torch.randn(4, 4), torch.randint(3, (4,)), torch.full((4,), -100.0 if step == 2 else -1.0), -torch.rand(4))
        for step in range(4)
    ]
    return Case(
        model=policy,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(policy.parameters()),
        precision="fp32",
        direct=True,
    )

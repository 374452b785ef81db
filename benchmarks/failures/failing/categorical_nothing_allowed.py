"""A categorical distribution over actions of which none is allowed: its normalisation is -inf - -inf."""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(92)
    policy = nn.Linear(4, 3)

    def loss_fn(state: Tensor, allowed: Tensor, action: Tensor) -> Tensor:
        logits = policy(state).masked_fill(~allowed, float("-inf"))
        chosen = Categorical(logits=logits, validate_args=False)  # guilty: cancelled-infinities
        return -chosen.log_prob(action).mean()

    batches = [(torch.randn(4, 4), torch.ones(4, 3, dtype=torch.bool), torch.randint(3, (4,))) for _ in range(4)]
    batches[2][1][1] = False
    return Case(
        model=policy,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(policy.parameters()),
        precision="fp32",
        direct=True,
    )

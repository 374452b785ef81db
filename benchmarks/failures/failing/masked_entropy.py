"""Entropy of a policy with forbidden actions: 0 * -inf."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(72)
    policy = nn.Linear(4, 3)

    def loss_fn(state: Tensor, allowed: Tensor) -> Tensor:
        logits = policy(state).masked_fill(~allowed, float("-inf"))
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)  # guilty: cancelled-infinities
        return -entropy.mean()

    batches = [(torch.randn(4, 4), torch.ones(4, 3, dtype=torch.bool)) for _ in range(4)]
    batches[2][1][1, 0] = False
    return Case(
        model=policy,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(policy.parameters()),
        precision="fp32",
        direct=True,
    )

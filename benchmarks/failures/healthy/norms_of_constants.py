"""GroupNorm, LayerNorm and RMSNorm of constant inputs."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(15)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4, eps=1e-12), nn.RMSNorm(4), nn.Linear(4, 1))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches = [(torch.full((4, 4), value),) for value in (0.0, 1.0, -3.0)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

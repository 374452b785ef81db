"""Scale-invariant SDR of a silent target: 0/0 in the projection."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def si_sdr(estimate: Tensor, target: Tensor) -> Tensor:
    dot = (estimate * target).sum(-1, keepdim=True)
    energy = target.square().sum(-1, keepdim=True)
    projected = dot / energy * target  # guilty: division-by-zero
    noise = estimate - projected
    return 10 * torch.log10(projected.square().sum(-1) / noise.square().sum(-1))


def case() -> Case:
    torch.manual_seed(37)
    model = nn.Linear(16, 16)

    def loss_fn(mix: Tensor, target: Tensor) -> Tensor:
        return -si_sdr(model(mix), target).mean()

    batches = [(torch.randn(3, 16), torch.randn(3, 16)) for _ in range(4)]
    batches[2][1][0] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

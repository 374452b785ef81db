"""A GAN's original generator loss: log(1 - D) of a discriminator that is sure."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(86)
    nets = nn.ModuleDict(
        {
            "generator": nn.Linear(2, 4),
            "judge": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()),
        }
    )

    def loss_fn(noise: Tensor) -> Tensor:
        fooled = nets["judge"](nets["generator"](noise))
        return torch.log(1 - fooled).mean()  # guilty: unstable-loss

    with torch.no_grad():
        nets["judge"][2].weight.abs_().mul_(100)
    batches = [(torch.randn(4, 2) * (1 if step < 2 else 50),) for step in range(3)]
    return Case(
        model=nets,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(nets["generator"].parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

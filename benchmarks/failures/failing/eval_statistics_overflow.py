"""The second of two models, frozen, has a running variance of inf from a step that was never skipped."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(119)
    trained = nn.Linear(4, 4)
    judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval().requires_grad_(False)
    judge[1].running_mean[2] = float("nan")
    both = nn.ModuleDict({"trained": trained, "judge": judge})

    def loss_fn(x: Tensor) -> Tensor:
        return judge(trained(x)).mean()  # guilty: poisoned-statistics

    batches = [(torch.randn(4, 4),) for _ in range(2)]
    return Case(
        model=both,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(trained.parameters()),
        precision="fp32",
        direct=True,
    )

"""A critic clamped in its loss function, with numpy's random numbers, while the loss scale settles."""

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(22)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_fn(x: Tensor) -> Tensor:
        for weight in model.parameters():
            weight.data.clamp_(-0.3, 0.3)
        noise = torch.from_numpy(np.random.randn(*x.shape)).float()
        return model(x).mean() - model(noise).mean()

    batches = [(torch.randn(8, 4),) for _ in range(16)]
    options = {"scaling": {"init_scale": 2.0**26}}
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-2),
        options=options,
    )

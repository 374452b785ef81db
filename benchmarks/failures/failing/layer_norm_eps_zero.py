"""LayerNorm with eps=0 on a row that is constant: 0/0 within the fused kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(1)
    norm, head = nn.LayerNorm(6, eps=0.0), nn.Linear(6, 1)
    model = nn.ModuleList([norm, head])

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        x = norm(x)  # guilty: division-by-zero
        return F.mse_loss(head(x), target)

    batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(4)]
    batches[2][0][1] = 0.5
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

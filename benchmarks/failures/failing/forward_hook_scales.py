"""A forward hook multiplies an activation in half beyond 65504."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(102)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def scaled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output * 1000  # guilty: half-overflow

    model[0].register_forward_hook(scaled)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4) * (500 if step == 2 else 0.01), torch.randint(2, (4,))) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        options={"scaling": {"init_scale": 8.0}},
    )

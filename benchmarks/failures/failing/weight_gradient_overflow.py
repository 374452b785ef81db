"""Features in the tens of thousands and a loss that is a sum: outputs are small, and the weight's gradient leaves half
at a loss scale of 1 too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)
        nn.init.normal_(self.out.weight, std=1e-4)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(features).squeeze(-1)  # guilty: gradient-overflow


def case() -> Case:
    torch.manual_seed(64)
    model = Scorer()

    def loss_fn(features: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(model(features), target, reduction="sum")

    batches = [(20000 + 500 * torch.randn(32, 8), 50 + torch.randn(32)) for _ in range(10)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"scaling": {"init_scale": 4.0}}
    )

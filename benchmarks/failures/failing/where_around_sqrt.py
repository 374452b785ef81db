"""torch.where picks the safe branch in the forward pass; in the backward pass 0 * inf comes out of the other
(pytorch#68425).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class RootFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.body(x).square()
        root = torch.sqrt(energy)  # guilty: infinite-derivative
        safe = torch.where(energy > 0, root, torch.zeros_like(root))
        return self.head(safe)


def case() -> Case:
    torch.manual_seed(56)
    model = RootFeatures()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 5), torch.randn(4, 1)) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

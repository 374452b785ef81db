"""A ratio is taken where the count is not zero: torch.where hides the infinity from the loss, not from the gradient
(pytorch#4132).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Ratios(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hits = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        hits = self.hits(x).sigmoid()
        rate = hits / shown  # guilty: infinite-derivative
        return self.head(torch.where(shown > 0, rate, 0.0))


def case() -> Case:
    torch.manual_seed(75)
    model = Ratios()

    def loss_fn(x: Tensor, shown: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x, shown), label)

    batches = [(torch.randn(4, 4), torch.randint(1, 9, (4, 3)).float(), torch.randint(2, (4,))) for _ in range(5)]
    batches[3][1][2, 1] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

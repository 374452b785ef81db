"""A low-rank adapter whose down-projection was loaded with inf; its up-projection is still zero: 0 * inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        change = F.linear(x, self.down)  # guilty: bad-weights
        return self.base(x) + F.linear(change, self.up)


def case() -> Case:
    torch.manual_seed(15)
    model = nn.Sequential(Adapted(nn.Linear(6, 8), 2), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].down[1, 3] = float("inf")

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 6), torch.randint(2, (4,))) for _ in range(2)]
    trained = [p for p in model.parameters() if p.requires_grad]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(trained, lr=1e-3))

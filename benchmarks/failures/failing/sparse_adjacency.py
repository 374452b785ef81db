"""A sparse adjacency, normalised by degrees of 0, has NaN among its values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 2)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        hidden = self.proj(x)
        return torch.sparse.mm(adjacency, hidden)  # guilty: bad-batch


def case() -> Case:
    torch.manual_seed(65)
    model = GraphConvolution()

    def loss_fn(adjacency: Tensor, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(adjacency, x), label)

    def graph(bad: bool) -> Tensor:
        values = torch.tensor([0.5, 0.5, 1.0, float("nan") if bad else 1.0])
        return torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1, 2], [1, 2, 0, 0]]), values, (3, 3), check_invariants=True
        )

    batches = [(graph(step == 2), torch.randn(3, 4), torch.randint(2, (3,))) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

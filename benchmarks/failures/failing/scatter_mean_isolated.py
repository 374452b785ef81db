"""Mean of neighbours by index_add: a node without neighbours is divided by 0."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        message = self.proj(x)[source]
        total = torch.zeros_like(x).index_add_(0, target, message)
        degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target)))
        total.div_(degree.unsqueeze(1))  # guilty: division-by-zero
        return total + x


def case() -> Case:
    torch.manual_seed(39)
    model = Graph()

    def loss_fn(x: Tensor, edges: Tensor) -> Tensor:
        return model(x, edges).square().mean()

    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    batches = [(torch.randn(4, 4), edges) for edges in (ring, ring, ring[:, :3], ring)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

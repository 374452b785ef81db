"""Adam with eps=0, to match a paper: an embedding row that was not used has a gradient of zero, and 0 / 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, item: Tensor) -> Tensor:
        features = self.items(item)  # guilty: optimizer-division
        return self.out(features).squeeze(-1)


def case() -> Case:
    torch.manual_seed(72)
    model = Recommender()

    def loss_fn(item: Tensor, rating: Tensor) -> Tensor:
        return F.mse_loss(model(item), rating)

    chosen = [[0, 1, 2, 3], [1, 2, 3, 0], [3, 7, 0, 1], [8, 9, 1, 2]]
    batches = [(torch.tensor(items), torch.rand(4)) for items in chosen]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

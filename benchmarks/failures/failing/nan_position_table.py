"""A table of positions, a buffer, has NaN in its last row, which only long sequences reach."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.register_buffer("positions", torch.randn(6, 8))
        self.positions[5] = float("nan")
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.positions[: tokens.shape[1]]  # guilty: poisoned-statistics
        return self.head(x)


def case() -> Case:
    torch.manual_seed(12)
    model = Embed()

    def loss_fn(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    batches = [(torch.randint(10, (2, n)), torch.randint(10, (2, n))) for n in (4, 5, 6, 3)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

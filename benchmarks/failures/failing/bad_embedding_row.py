"""One row of a table loaded from a checkpoint is inf; nothing is wrong until its token turns up."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.table(tokens)  # guilty: bad-weights
        return self.out(self.norm(embedded))


def case() -> Case:
    torch.manual_seed(68)
    model = LanguageModel()
    with torch.no_grad():
        model.table.weight[15] = float("inf")

    def loss_fn(tokens: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    batches = [(torch.randint(15, (2, 4)), torch.randint(16, (2, 4))) for _ in range(5)]
    batches[3][0][0, 1] = 15
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

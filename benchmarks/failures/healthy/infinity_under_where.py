"""Reciprocal lengths, infinite for an empty sequence, are replaced with torch.where before they meet a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class MeanPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).float()
        inverse = 1 / mask.sum(1, keepdim=True)
        inverse = torch.where(inverse.isinf(), 0.0, inverse)
        pooled = (self.table(tokens) * mask.unsqueeze(-1)).sum(1) * inverse
        return self.head(pooled)


def case() -> Case:
    torch.manual_seed(7)
    model = MeanPool()

    def loss_fn(tokens: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), label)

    batches = [(torch.randint(1, 20, (4, 5)), torch.randint(2, (4,))) for _ in range(5)]
    batches[2][0][1] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

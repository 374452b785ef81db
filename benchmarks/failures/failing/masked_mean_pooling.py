"""Mean over the tokens that are not padding: a sentence without any is 0 / 0 (verl PR#782)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class SentenceEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.project = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).unsqueeze(-1).float()
        summed = (self.project(self.table(tokens)) * mask).sum(1)
        return summed / mask.sum(1)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(37)
    encoder = SentenceEncoder()
    model = nn.Sequential(encoder, nn.Linear(8, 2))

    def loss_fn(tokens: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), label)

    batches = [(torch.randint(1, 30, (4, 6)), torch.randint(2, (4,))) for _ in range(6)]
    batches[4][0][3] = 0
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

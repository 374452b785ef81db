"""Adagrad with eps=0: rows of an embedding that were not used have a sum of squares of 0."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, word: Tensor) -> Tensor:
        x = self.words(word)  # guilty: optimizer-division
        return self.head(x)


def case() -> Case:
    torch.manual_seed(19)
    model = Tagger()

    def loss_fn(word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(word), label)

    batches = [(torch.tensor(words), torch.randint(2, (3,))) for words in ([0, 1, 2], [3, 4, 5], [0, 2, 4])]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32")

"""A batch in which every label is the one to be ignored: a mean over no labels (pytorch#70348)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

IGNORED = -100


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens))


def case() -> Case:
    torch.manual_seed(49)
    model = Tagger()

    def loss_fn(tokens: Tensor, tags: Tensor) -> Tensor:
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, tags.flatten(), ignore_index=IGNORED)  # guilty: mean-of-nothing

    batches = [(torch.randint(20, (2, 5)), torch.randint(4, (2, 5))) for _ in range(5)]
    batches[2][1].fill_(IGNORED)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

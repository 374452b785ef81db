"""Tied input and output embeddings, loaded with one row of inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.embed(words))
        return self.out(x)  # guilty: bad-weights


def case() -> Case:
    torch.manual_seed(112)
    model = Tied()
    with torch.no_grad():
        model.embed.weight[7] = float("inf")

    def loss_fn(words: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(words), label)

    batches = [(torch.randint(7, (4,)), torch.randint(7, (4,))) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""Embeddings times the root of the width, in a half model: a rare token with a large row leaves the range."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.scale = math.sqrt(width)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table(tokens)
        return rows * self.scale  # guilty: half-overflow


def case() -> Case:
    torch.manual_seed(6)
    embedding = TokenEmbedding(20, 64)
    model = nn.Sequential(embedding, nn.LayerNorm(64), nn.Linear(64, 20)).half()
    with torch.no_grad():
        embedding.table.weight[13, 7] = 9000.0

    def loss_fn(tokens: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())

    batches = [(torch.randint(13, (2, 5)), torch.randint(20, (2, 5))) for _ in range(5)]
    batches[3][0][1, 2] = 13
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

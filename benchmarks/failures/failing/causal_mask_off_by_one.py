"""A causal mask with the diagonal in it, filled in place: the first token may look at nothing, itself included."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class CausalAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 3
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores.transpose(1, 2).masked_fill_(future, float("-inf"))
        return scores.softmax(dim=-1) @ value  # guilty: fully-masked-row


def case() -> Case:
    torch.manual_seed(48)
    model = nn.Sequential(nn.Embedding(12, 9), CausalAttention(9), nn.Linear(9, 12))

    def loss_fn(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    batches = [(torch.randint(12, (2, 6)),) for _ in range(3)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="bf16")

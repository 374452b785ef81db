"""Attention in blocks with a running maximum that starts at -inf: if the first block is masked, -inf less -inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

BLOCK = 2


class BlockwiseAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).float().chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2)).masked_fill(mask.unsqueeze(1), float("-inf"))
        largest = torch.full_like(scores[..., :1], float("-inf"))
        total, mixed = torch.zeros_like(largest), torch.zeros_like(query)
        for start in range(0, x.shape[1], BLOCK):
            block = scores[..., start : start + BLOCK]
            new = torch.maximum(largest, block.amax(-1, keepdim=True))
            shrink = torch.exp(largest - new)  # guilty: cancelled-infinities
            weights = torch.exp(block - new.clamp(min=-1e4))
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed = mixed * shrink + weights @ value[:, start : start + BLOCK]
            largest = new
        return mixed / total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = BlockwiseAttention(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, mask).mean(1))


def case() -> Case:
    torch.manual_seed(74)
    model = Model()

    def loss_fn(x: Tensor, mask: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x, mask), label)

    batches = [(torch.randn(2, 6, 6), torch.zeros(2, 6, dtype=torch.bool), torch.randint(2, (2,))) for _ in range(4)]
    batches[1][1][0, 4:] = True
    batches[2][1][1, :2] = True  # padded on the left
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer)

"""nn.MultiheadAttention with a key_padding_mask that is true throughout for one sample (Mask2Former#243)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class CrossAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, queries: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        mixed, _ = self.attention(queries, memory, memory, key_padding_mask=padding)  # guilty: fully-masked-row
        return self.head(mixed.mean(1))


def case() -> Case:
    torch.manual_seed(47)
    model = CrossAttention(8)

    def loss_fn(queries: Tensor, memory: Tensor, padding: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(queries, memory, padding), label)

    batches = []
    for step in range(4):
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[0, 3:] = True
        padding[1] = step == 2
        batches.append((torch.randn(2, 3, 8), torch.randn(2, 5, 8), padding, torch.randint(3, (2,))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

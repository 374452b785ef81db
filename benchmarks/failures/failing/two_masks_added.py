"""The masks of padded queries and of padded keys, each the smallest half, are added: twice the smallest is -inf, and a
sample that is all padding has nothing else (transformers PR#17306).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SMALLEST = torch.finfo(torch.float16).min


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        padded = padding.to(torch.float16) * SMALLEST
        mask = padded.unsqueeze(1) + padded.unsqueeze(2)  # guilty: half-overflow
        weights = torch.softmax(query @ key.transpose(1, 2) + mask, dim=-1)
        return self.head(weights @ value)


def case() -> Case:
    torch.manual_seed(21)
    model = Encoder(8)

    def loss_fn(x: Tensor, padding: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x, padding).flatten(0, 1), labels.flatten())

    def sample(padded: int) -> tuple[Tensor, Tensor, Tensor]:
        padding = torch.zeros(2, 4, dtype=torch.bool)
        padding[1, :padded] = True
        return torch.randn(2, 4, 8), padding, torch.randint(10, (2, 4))

    batches = [sample(padded) for padded in (0, 0, 4, 0)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

"""An attention mask of -1e9 becomes -inf in half; a padded row that is masked throughout is NaN (apex#93)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        penalty = (1 - keep.to(scores.dtype)) * -1e9  # guilty: half-overflow
        weights = torch.softmax(scores + penalty.unsqueeze(1), dim=-1)
        return weights @ self.value(x)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.head(self.attention(x, keep).mean(1))


def case() -> Case:
    torch.manual_seed(20)
    model = Classifier()

    def loss_fn(x: Tensor, keep: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x, keep), label)

    batches = []
    for step in range(5):
        keep = torch.ones(3, 4, dtype=torch.long)
        keep[0, 2:] = 0
        if step == 3:
            keep[1] = 0
        batches.append((torch.randn(3, 4, 16), keep, torch.randint(2, (3,))))
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

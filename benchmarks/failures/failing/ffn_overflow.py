"""A T5-like feed-forward block whose output leaves FP16's range once activations have grown (transformers#5651)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.wi(x))
        return self.wo(hidden)  # guilty: half-overflow


class Encoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ffn = FeedForward(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ffn(x)
        return self.head(self.norm(x))


def case() -> Case:
    torch.manual_seed(0)
    model = Encoder()
    with torch.no_grad():
        model.ffn.wi.weight.mul_(20)
        model.ffn.wo.weight.mul_(20)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    scales = [1.0, 1.0, 1.0, 400.0, 1.0]
    batches = [(torch.randn(8, 32) * scale, torch.randint(4, (8,))) for scale in scales]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))

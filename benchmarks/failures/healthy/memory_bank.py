"""A queue of keys with a plain number as its pointer, and a momentum encoder, while the loss scale settles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
        self.pointer = 0

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)
        self.queue[self.pointer : self.pointer + len(keys)] = keys
        self.pointer = (self.pointer + len(keys)) % len(self.queue)

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.key(x).float(), dim=1)
        logits = F.normalize(self.query(x), dim=1) @ torch.cat([keys, self.queue]).T
        self.enqueue(keys)
        return F.cross_entropy(logits / 0.1, torch.arange(len(x)))


def case() -> Case:
    torch.manual_seed(20)
    model = Contrast()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x)

    batches = [(torch.randn(4, 4),) for _ in range(14)]
    options = {"scaling": {"init_scale": 2.0**24}}
    trained = [p for p in model.parameters() if p.requires_grad]
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(trained, lr=0.1), options=options
    )

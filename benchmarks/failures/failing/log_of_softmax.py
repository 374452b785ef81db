"""A head that returns the log of a softmax, in two operations: under autocast a small probability is zero in half."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class LogProbabilities(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.logits(x), dim=-1)
        return torch.log(p)  # guilty: outside-domain


def case() -> Case:
    torch.manual_seed(32)
    head = LogProbabilities(12, 4)
    model = nn.Sequential(nn.Linear(6, 12), head)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.nll_loss(model(x), label)

    batches = [(torch.randn(8, 6) * (60 if step == 2 else 1), torch.randint(4, (8,))) for step in range(4)]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

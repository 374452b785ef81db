"""The mask is chosen with torch.where and a constant tensor; the last sample has no valid key."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        scores = torch.where(valid, scores, torch.tensor(float("-inf")))
        return F.log_softmax(scores, dim=1)  # guilty: fully-masked-row


def case() -> Case:
    torch.manual_seed(9)
    model = Pointer()

    def loss_fn(x: Tensor, valid: Tensor, label: Tensor) -> Tensor:
        return F.nll_loss(model(x, valid), label)

    batches = [
        (torch.randn(3, 5, 6), torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, dtype=torch.long)) for _ in range(4)
    ]
    batches[1][1][2] = False
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

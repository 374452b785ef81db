"""Binary cross entropy with logits over no positives."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class DetectorLoss(nn.Module):
    def forward(self, scores: Tensor, positive: Tensor) -> Tensor:
        chosen = scores[positive]
        return F.binary_cross_entropy_with_logits(chosen, torch.ones_like(chosen))  # guilty: mean-of-nothing


def case() -> Case:
    torch.manual_seed(6)
    model, criterion = nn.Linear(4, 1), DetectorLoss()

    def loss_fn(x: Tensor, positive: Tensor) -> Tensor:
        return criterion(model(x).squeeze(1), positive)

    batches = [(torch.randn(6, 4), torch.rand(6) < 0.7) for _ in range(4)]
    batches[2][1][:] = False
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()))

"""Probabilities of an ensemble are averaged and taken back to logits; all are 1."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        p = torch.stack([torch.sigmoid(member(x)) for member in self.members]).mean(0)
        return torch.logit(p)  # guilty: outside-domain


def case() -> Case:
    torch.manual_seed(108)
    model = Ensemble()
    with torch.no_grad():
        for member in model.members:
            member.weight.abs_()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), label)

    batches = [(torch.rand(4, 4) * (200 if step == 2 else 1), torch.ones(4, 1)) for step in range(4)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

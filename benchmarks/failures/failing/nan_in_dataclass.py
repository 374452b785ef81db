"""A batch that is a dataclass; the mask of one sample has NaN."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


@dataclass
class Sample:
    features: Tensor
    mask: Tensor
    label: Tensor


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, sample: Sample) -> Tensor:
        kept = sample.features * sample.mask.unsqueeze(-1)  # guilty: bad-batch
        return self.head(kept.sum(1))


def case() -> Case:
    torch.manual_seed(62)
    model = Pooled()

    def loss_fn(sample: Sample) -> Tensor:
        return F.cross_entropy(model(sample), sample.label)

    batches = [(Sample(torch.randn(3, 5, 4), torch.ones(3, 5), torch.randint(2, (3,))),) for _ in range(4)]
    batches[2][0].mask[1, 4] = float("nan")
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

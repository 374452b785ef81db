"""An operator of one's own, as a CUDA extension would be: what is inside cannot be seen, and it returns NaN."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


@torch.library.custom_op("zoo::inverse_frequency", mutates_args=())
def inverse_frequency(counts: Tensor) -> Tensor:
    frequency = counts / counts.sum(-1, keepdim=True)
    return 1 - frequency


class TermWeights(nn.Module):
    def __init__(self, terms: int) -> None:
        super().__init__()
        self.project = nn.Linear(terms, 4)

    def forward(self, counts: Tensor) -> Tensor:
        weights = inverse_frequency(counts)  # guilty: custom-op
        return self.project(weights)


def case() -> Case:
    torch.manual_seed(62)
    model = nn.Sequential(TermWeights(6), nn.ReLU(), nn.Linear(4, 2))

    def loss_fn(counts: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(counts), label)

    batches = [(torch.randint(1, 9, (3, 6)).float(), torch.randint(2, (3,))) for _ in range(4)]
    batches[2][0][1] = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

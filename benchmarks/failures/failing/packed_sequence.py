"""A packed sequence with a NaN, into a GRU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from benchmarks.failures.case import Case


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        _, last = self.gru(packed)  # guilty: bad-batch
        return self.head(last[0])


def case() -> Case:
    torch.manual_seed(66)
    model = Reader()

    def loss_fn(packed: PackedSequence, label: Tensor) -> Tensor:
        return F.cross_entropy(model(packed), label)

    def packed(bad: bool) -> PackedSequence:
        x = torch.randn(5, 2, 3)
        if bad:
            x[2, 0, 1] = float("nan")
        return pack_padded_sequence(x, torch.tensor([5, 3]))

    batches = [(packed(step == 1), torch.randint(2, (2,))) for step in range(3)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

"""CTC with transcripts that are too long, and zero_infinity=True."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(6)
    model = nn.Linear(4, 5)

    def loss_fn(audio: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        log_p = model(audio).log_softmax(-1)
        return F.ctc_loss(log_p, text, torch.full((2,), 6), lengths, zero_infinity=True)

    batches = [
        (torch.randn(6, 2, 4), torch.randint(1, 5, (2, 8)), torch.tensor(n)) for n in ([3, 2], [8, 2], [8, 8], [2, 2])
    ]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

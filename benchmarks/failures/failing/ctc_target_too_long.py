"""CTC with a transcript longer than the audio: no alignment, and the loss is inf."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(25)
    model = nn.GRU(4, 6)
    head = nn.Linear(6, 5)
    both = nn.ModuleList([model, head])

    def loss_fn(audio: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        hidden, _ = model(audio)
        log_p = head(hidden).log_softmax(-1)
        heard = torch.full((audio.shape[1],), audio.shape[0])
        return F.ctc_loss(log_p, text, heard, lengths)  # guilty: unstable-loss

    batches = [
        (torch.randn(6, 2, 4), torch.randint(1, 5, (2, 8)), torch.tensor(n)) for n in ([3, 2], [2, 3], [8, 2], [2, 2])
    ]
    return Case(
        model=both,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(both.parameters()),
        precision="fp32",
        direct=True,
    )

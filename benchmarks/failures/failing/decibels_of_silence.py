"""Features in decibels, made of silence: -inf in the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, spectrogram: Tensor) -> Tensor:
        hidden, _ = self.lstm(spectrogram)  # guilty: bad-batch
        return self.head(hidden[:, -1])


def case() -> Case:
    torch.manual_seed(64)
    model = Listener()

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["spectrogram"]), batch["label"])

    batches = [({"spectrogram": torch.randn(2, 5, 4), "label": torch.randint(2, (2,))},) for _ in range(4)]
    batches[2][0]["spectrogram"][1, :, 0] = float("-inf")
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

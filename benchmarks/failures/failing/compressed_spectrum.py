"""A spectral loss with power-law compression: |X|**0.3 has an infinite derivative at a silent bin."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def compressed(wave: Tensor) -> Tensor:
    window = torch.hann_window(8)
    spectrum = torch.stft(wave, 8, 4, window=window, return_complex=True).abs()
    return spectrum.pow(0.3)  # guilty: infinite-derivative


def case() -> Case:
    torch.manual_seed(35)
    model = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def loss_fn(wave: Tensor, target: Tensor) -> Tensor:
        heard = model(wave.unsqueeze(1)).squeeze(1)
        return F.l1_loss(compressed(heard), compressed(target))

    batches = [(torch.randn(2, 32), torch.randn(2, 32)) for _ in range(4)]
    batches[2][0][1, 10:] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

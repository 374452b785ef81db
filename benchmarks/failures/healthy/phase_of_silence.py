"""The phase of a spectrum at bins that are exactly zero: torch takes 0 for the derivative of `angle` there."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class PhaseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(wave * self.gain)
        return torch.angle(spectrum)  # and not atan2, whose derivative at zero is NaN up to torch 2.6


def case() -> Case:
    torch.manual_seed(34)
    model = PhaseNet()

    def loss_fn(wave: Tensor) -> Tensor:
        return model(wave).cos().mean()

    batches = [(torch.randn(3, 8),) for _ in range(4)]
    batches[2][0][1] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

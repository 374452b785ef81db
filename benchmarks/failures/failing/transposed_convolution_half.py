"""A decoder's transposed convolution goes over 65504."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.out = nn.Conv2d(2, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.out(
            torch.tanh(
                self.up(z) - self.up(z).mean()  # guilty: half-overflow
            )
        )


def case() -> Case:
    torch.manual_seed(104)
    model = Decoder()

    def loss_fn(z: Tensor) -> Tensor:
        return model(z).square().mean()

    batches = [(torch.randn(1, 4, 3, 3) * (60000 if step == 2 else 1),) for step in range(4)]
    with torch.no_grad():
        model.up.weight.mul_(5)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))

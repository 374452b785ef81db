"""An additive mask made by multiplying with -inf: 0 * -inf is NaN where nothing is masked."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = (1 - mask) * float("-inf")  # guilty: cancelled-infinities
        weights = torch.softmax(q @ k.mT / 8**0.5 + bias.unsqueeze(1), -1)
        return weights @ v


def case() -> Case:
    torch.manual_seed(7)
    model = Attention()

    def loss_fn(x: Tensor, mask: Tensor) -> Tensor:
        return model(x, mask).square().mean()

    batches = [(torch.randn(2, 4, 8), torch.ones(2, 4)) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

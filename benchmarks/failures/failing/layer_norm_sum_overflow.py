"""A layer norm by hand in a model that is all half: the sum behind the mean overflows, and inf / inf follows."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(-1, keepdim=True) / x.shape[-1]  # guilty: half-overflow
        centred = x - mean
        spread = centred.abs().mean(-1, keepdim=True)
        return self.gain * centred / (spread + 1e-3)


def case() -> Case:
    torch.manual_seed(2)
    wide = nn.Linear(16, 256)
    model = nn.Sequential(wide, LayerNorm(256), nn.Linear(256, 1)).half()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return (model(x) - target).abs().mean()

    offsets = [0.0, 0.0, 3000.0, 0.0]
    batches = [(torch.randn(4, 16).half() + offset, torch.randn(4, 1).half()) for offset in offsets]
    with torch.no_grad():
        wide.weight.abs_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

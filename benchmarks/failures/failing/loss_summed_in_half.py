"""An L1 loss summed over pixels, in a half model: fine for crops, and beyond the range for a whole image."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).half()

    def loss_fn(pixels: Tensor, clean: Tensor) -> Tensor:
        difference = (model(pixels) - clean).abs()
        return difference.sum()  # guilty: half-overflow

    batches = [(torch.randn(size, 4).half(), torch.randn(size, 4).half() * 2) for size in (100, 400, 900, 20000)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

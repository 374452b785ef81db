"""A block under torch.compile (aot_eager): the fault is in a line of its forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        centred = y - y.mean(-1, keepdim=True)
        spread = centred.square().sum(-1, keepdim=True)
        return centred / spread.log()  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(52)
    block = Block()
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(block, backend="aot_eager"), nn.Linear(4, 1))
    with torch.no_grad():
        block.proj.weight.zero_()
        block.proj.bias.copy_(torch.tensor([0.5, 0.5, -0.5, -0.5]))

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(2)]
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), precision="fp32"
    )

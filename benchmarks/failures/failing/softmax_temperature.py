"""A temperature that is annealed towards zero: logits divided by it no longer fit into half."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class CodebookRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(8, 6)
        self.codes = nn.Linear(6, 4)

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        sharpened = self.logits(x) / temperature  # guilty: half-overflow
        return self.codes(torch.softmax(sharpened, dim=-1))


def case() -> Case:
    torch.manual_seed(14)
    model = CodebookRouter()

    def loss_fn(x: Tensor, target: Tensor, temperature: float) -> Tensor:
        return F.mse_loss(model(x, temperature), target)

    temperatures = [1.0, 0.1, 1e-2, 1e-3, 1e-6]
    batches = [(torch.randn(4, 8), torch.randn(4, 4), temperature) for temperature in temperatures]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options={"clip_norm": 1.0})

"""Gates and activations that are saturated: sigmoids of exactly 0 and 1, tanh of exactly -1, gradients of zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(100 * self.gate(x)) * torch.tanh(100 * self.value(x))


def case() -> Case:
    torch.manual_seed(13)
    model = nn.Sequential(Gated(), nn.Linear(6, 2))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(6, 6) * 3, torch.randint(2, (6,))) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

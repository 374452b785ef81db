"""Max pooling with a border of -inf, which no window is made of alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1), value=float("-inf"))
        return padded.unfold(-1, 3, 2).amax(-1)


def case() -> Case:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), Pool(), nn.Flatten(), nn.Linear(20, 2))

    def loss_fn(signal: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(signal), label)

    batches = [(torch.randn(3, 1, 10), torch.randint(2, (3,))) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

"""A layer of an installed package, called from here: the line to show is the one of ours that called it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SOURCE = """
import torch as t


class Whitening(t.nn.Module):
    def forward(self, x):
        return x / x.std(0)
"""
package: dict[str, object] = {}
exec(compile(SOURCE, "/opt/env/lib/python3.11/site-packages/layers/whitening.py", "exec"), package)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.white = package["Whitening"]()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.white(x)  # guilty: division-by-zero
        return self.head(x)


def case() -> Case:
    torch.manual_seed(88)
    model = Net()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    batches[1][0][:, 2] = 3.0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp32",
        direct=True,
    )

"""A head that starts at zero, dead units and one-hot inputs: most activations and gradients are exactly zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(2)
    hidden, head = nn.Linear(10, 16), nn.Linear(16, 3)
    model = nn.Sequential(hidden, nn.ReLU(), head)
    with torch.no_grad():
        hidden.bias.fill_(-0.2)
        head.weight.zero_()
        head.bias.zero_()

    def loss_fn(token: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(F.one_hot(token, 10).float()), label)

    batches = [(torch.randint(10, (8,)), torch.randint(3, (8,))) for _ in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

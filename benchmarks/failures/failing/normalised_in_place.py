"""The batch is normalised in place by the loss function; one sample is constant."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(-1, keepdim=True))
        x.div_(x.std(-1, keepdim=True))  # guilty: division-by-zero
        return self.net(x)


def case() -> Case:
    torch.manual_seed(120)
    model = Net()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    batches[2][0][1] = 3.0
    return Case(
        model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters()), precision="fp32"
    )

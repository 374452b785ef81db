"""weight_norm of a layer that was initialised with a row of zeros: 0/0 when the weight is made."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight[1] = 0
        self.layer = weight_norm(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # guilty: division-by-zero


def case() -> Case:
    torch.manual_seed(54)
    model = Net()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x), target)

    batches = [(torch.randn(4, 4), torch.randn(4, 3)) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

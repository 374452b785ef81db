"""Binary cross entropy written out in FP32: the sigmoid saturates at exactly 1, and log(1 - 1) is taken."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.score(x)).squeeze(-1)


def case() -> Case:
    torch.manual_seed(24)
    model = Detector()

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        p = model(x)
        present = label * torch.log(p)
        absent = (1 - label) * torch.log(1 - p)  # guilty: unstable-loss
        return -(present + absent).mean()

    batches = [(torch.randn(8, 5), torch.randint(2, (8,)).float()) for _ in range(6)]
    batches[4] = (model.score.weight.detach().sign().expand(8, 5) * 40, torch.ones(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

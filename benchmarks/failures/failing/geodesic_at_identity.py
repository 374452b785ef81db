"""acos of a cosine clamped to [-1, 1]: the value is safe, and the slope at 1 is not (kornia#4007)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class DirectionHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.body.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def case() -> Case:
    torch.manual_seed(58)
    model = DirectionHead()

    def loss_fn(x: Tensor, direction: Tensor) -> Tensor:
        cosine = (model(x) * direction).sum(-1).clamp(-1.0, 1.0)
        angle = torch.acos(cosine)  # guilty: infinite-derivative
        return angle.mean()

    batches = [(torch.randn(4, 3) * 0.3, torch.randn(4, 3) * 0.3) for _ in range(4)]
    batches[2] = (torch.eye(3), torch.eye(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

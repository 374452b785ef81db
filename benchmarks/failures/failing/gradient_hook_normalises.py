"""A hook divides the gradient by its norm, which is 0 for a sample that does not count."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / grad.norm(dim=1, keepdim=True))  # guilty: division-by-zero
        return self.second(hidden)


def case() -> Case:
    torch.manual_seed(44)
    model = Net()

    def loss_fn(x: Tensor, weight: Tensor) -> Tensor:
        return (model(x).squeeze(1) * weight).mean()

    batches = [(torch.randn(4, 4), torch.rand(4) + 0.1) for _ in range(4)]
    batches[2][1][3] = 0
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

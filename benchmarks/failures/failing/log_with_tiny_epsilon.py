"""log(p + 1e-8) in half, where 1e-8 is zero (apex#358)."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), dim=-1)


def case() -> Case:
    torch.manual_seed(23)
    model = Classifier()

    def loss_fn(x: Tensor, soft_labels: Tensor) -> Tensor:
        probabilities = model(x).half()
        logs = torch.log(probabilities + 1e-8)  # guilty: unstable-loss
        return -(soft_labels.half() * logs).sum(-1).mean()

    batches = [
        (torch.randn(6, 10) * (60 if step == 2 else 1), torch.softmax(torch.randn(6, 5), -1)) for step in range(4)
    ]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))

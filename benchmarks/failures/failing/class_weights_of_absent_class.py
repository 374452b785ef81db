"""Class weights are inverse frequencies and one class was never seen: the criterion holds an inf."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Classifier(nn.Module):
    def __init__(self, counts: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts, label_smoothing=0.1)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        logits = self.body(x)
        return self.criterion(logits, label)  # guilty: poisoned-statistics


def case() -> Case:
    torch.manual_seed(13)
    model = Classifier(torch.tensor([10.0, 5.0, 0.0]))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return model(x, label)

    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(2)]
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.Adam(model.parameters()),
        precision="fp32",
        direct=True,
    )

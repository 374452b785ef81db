"""A focal loss with gamma 0.5: (1 - p) ** 0.5 has an infinite derivative where p is 1."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(107)
    model = nn.Linear(4, 3)

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        p = model(x).softmax(-1).gather(1, label[:, None]).squeeze(1)
        weight = (1 - p) ** 0.5  # guilty: infinite-derivative
        return (weight * -p.clamp_min(1e-6).log()).mean()

    batches = [(torch.randn(4, 4), torch.randint(3, (4,))) for _ in range(4)]
    with torch.no_grad():
        sure = model(batches[2][0] * 1e3).argmax(-1)
    batches[2] = (batches[2][0] * 1e3, sure)
    return Case(
        model=model,
        loss_fn=loss_fn,
        batches=batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-5),
        precision="fp32",
        direct=True,
    )

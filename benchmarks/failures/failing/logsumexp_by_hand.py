"""Cross entropy as the log of a sum of exponentials, without taking off the largest logit, in FP32."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(27)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        logits = model(x)
        chosen = logits.gather(1, label.unsqueeze(1)).squeeze(1)
        total = torch.exp(logits).sum(1)  # guilty: unstable-loss
        return (torch.log(total) - chosen).mean()

    batches = [(torch.randn(4, 12) * (3000 if step == 3 else 1), torch.randint(6, (4,))) for step in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

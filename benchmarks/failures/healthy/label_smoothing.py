"""Label smoothing with class weights, one of which is zero, and some labels ignored."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case

SETTLING = {"scaling": {"init_scale": 2.0**18}}  # the first steps are skipped, and looked at


def case() -> Case:
    torch.manual_seed(16)
    model = nn.Linear(6, 4)
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5])

    def loss_fn(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label, weight=weights, label_smoothing=0.1, ignore_index=-1)

    batches = [(torch.randn(8, 6), torch.randint(-1, 4, (8,))) for _ in range(5)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, options=SETTLING)

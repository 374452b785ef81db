"""A target that was divided by zero when the data were prepared; the network and its input are fine."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


def case() -> Case:
    torch.manual_seed(66)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))

    def loss_fn(sample: dict[str, Tensor]) -> Tensor:
        predicted = model(sample["inputs"]).squeeze(-1)
        return F.huber_loss(predicted, sample["ratio"])  # guilty: bad-batch

    batches = [({"inputs": torch.randn(4, 5), "ratio": torch.randn(4)},) for _ in range(4)]
    batches[2][0]["ratio"][1] = float("inf")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""An observation normaliser of one's own, whose mean became NaN in an earlier run and came along in the checkpoint."""

import torch
from torch import Tensor, nn

from benchmarks.failures.case import Case


class Normaliser(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean  # guilty: poisoned-statistics
        return centred / self.std


def case() -> Case:
    torch.manual_seed(70)
    model = nn.Sequential(Normaliser(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    state = model.state_dict()
    state["0.mean"] = torch.tensor([0.0, 0.0, float("nan"), 0.0])
    model.load_state_dict(state)

    def loss_fn(observation: Tensor, value: Tensor) -> Tensor:
        return (model(observation) - value).square().mean()

    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(3)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=optimizer, precision="fp32", direct=True)

"""A model inside the wrapper of a home-made trainer library, called through a registry and keyword arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures.case import Case


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, 2)
        self.up = nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.up(F.relu(self.down(x.mean(1))))
        return x * weights.unsqueeze(1)  # guilty: half-overflow


class Wrapper(nn.Module):
    """What a library puts around a user's model."""

    def __init__(self, inner: nn.Module, objectives: dict[str, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.inner = inner
        self.objectives = objectives

    def forward(self, batch: dict[str, Any]) -> Tensor:
        outputs = self.inner(batch["inputs"])
        return torch.stack([objective(outputs, batch) for objective in self.objectives.values()]).sum()


def case() -> Case:
    torch.manual_seed(12)
    inner = nn.Sequential(nn.Linear(4, 8), SqueezeExcite(8), nn.LayerNorm(8), nn.Linear(8, 2))
    model = Wrapper(inner, {"labels": lambda outputs, batch: F.cross_entropy(outputs.mean(1), batch["labels"])})

    def loss_fn(batch: dict[str, Any]) -> Tensor:
        return model(batch)

    batches = [
        ({"inputs": torch.randn(3, 5, 4) + (-6000 if step == 1 else 0), "labels": torch.randint(2, (3,))},)
        for step in range(3)
    ]
    return Case(model=model, loss_fn=loss_fn, batches=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))

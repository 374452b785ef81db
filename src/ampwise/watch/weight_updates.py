"""Whether updates change BF16 weights: compare some weights before and after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise.train.low_bit.safe_updates import keeps_small_updates
from ampwise.train.scaler.async_scalars import AsyncScalars
from ampwise.watch.gradient_health import UpdateCounts
from ampwise.watch.inspection import parameters_of

__all__ = ["WeightComparison", "copy_weights"]

TENSORS = 16  # to compare
VALUES = 4096  # of each


@dataclass(slots=True)
class WeightComparison:
    """Some weights before a step."""

    names: list[str]
    weights: list[Tensor]  # views of the current weights
    before: list[Tensor]
    tried: list[Tensor]  # where there was a gradient
    posted: AsyncScalars | None = None

    def after_step(self) -> None:
        """Count changed weights, on the device."""
        with torch.no_grad():
            moved = [
                torch.stack([((now != then) & tried).sum(), tried.sum()])
                for now, then, tried in zip(self.weights, self.before, self.tried, strict=True)
            ]
            self.posted = AsyncScalars(torch.stack(moved).float())

    @property
    def arrived(self) -> bool:
        return self.posted is not None and self.posted.arrived

    def shares(self) -> dict[str, UpdateCounts]:
        """Return the counts by parameter. Syncs with the device unless ``arrived``."""
        assert self.posted is not None
        numbers = iter(self.posted.read())
        return {name: UpdateCounts(moved=int(next(numbers)), tried=int(next(numbers))) for name in self.names}


def copy_weights(optimizer: Any, names: Sequence[str]) -> WeightComparison | None:
    """Copy some of an optimizer's BF16 weights. None if none has a gradient, or if it handles small updates itself."""
    if keeps_small_updates(optimizer):  # e.g. stochastic rounding: a weight may stay the same without a loss
        return None
    every = parameters_of(optimizer)
    found = [(name, each) for name, each in zip(names, every, strict=True) if _is_plain_bf16(each)]
    chosen = found[:: max(len(found) // TENSORS, 1)][:TENSORS]
    if not chosen:
        return None
    with torch.no_grad():
        weights = [each.detach().view(-1)[:: max(each.numel() // VALUES, 1)] for _, each in chosen]
        tried = [each.grad.view(-1)[:: max(each.numel() // VALUES, 1)] != 0 for _, each in chosen]
        return WeightComparison([name for name, _ in chosen], weights, [each.clone() for each in weights], tried)


def _is_plain_bf16(parameter: Tensor) -> bool:
    grad = parameter.grad
    return (
        parameter.dtype == torch.bfloat16
        and grad is not None
        and grad.layout == torch.strided
        and parameter.is_contiguous()
        and grad.is_contiguous()
        and not hasattr(parameter, "placements")
    )

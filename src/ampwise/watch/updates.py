"""Whether updates reach BF16 weights: some weights before a step and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampwise.engine.scaling.facts import Posted
from ampwise.evidence.health import UpdateShare
from ampwise.low_bit.care import small_updates_count
from ampwise.watch.asking import parameters_of

__all__ = ["Compared", "before_step"]

TENSORS = 16  # that are looked at
VALUES = 4096  # of each


@dataclass(slots=True)
class Compared:
    """Weights as they were."""

    names: list[str]
    weights: list[Tensor]  # views, which show what they have become
    before: list[Tensor]
    tried: list[Tensor]  # where there was a gradient
    posted: Posted | None = None

    def after_step(self) -> None:
        """Count those that have changed, on the device."""
        with torch.no_grad():
            moved = [
                torch.stack([((now != then) & tried).sum(), tried.sum()])
                for now, then, tried in zip(self.weights, self.before, self.tried, strict=True)
            ]
            self.posted = Posted(torch.stack(moved).float())

    @property
    def arrived(self) -> bool:
        return self.posted is not None and self.posted.arrived

    def shares(self) -> dict[str, UpdateShare]:
        """By parameter; waits for the device unless ``arrived``."""
        assert self.posted is not None
        numbers = iter(self.posted.read())
        return {name: UpdateShare(moved=int(next(numbers)), tried=int(next(numbers))) for name in self.names}


def before_step(optimizer: Any, names: Sequence[str]) -> Compared | None:
    """Remember some of an optimizer's BF16 weights; None if it has none with a gradient, or sees to small updates."""
    if small_updates_count(optimizer):  # only now and then do they change a weight, and none is lost
        return None
    every = parameters_of(optimizer)
    found = [(name, each) for name, each in zip(names, every, strict=True) if _is_plain_bf16(each)]
    chosen = found[:: max(len(found) // TENSORS, 1)][:TENSORS]
    if not chosen:
        return None
    with torch.no_grad():
        weights = [each.detach().view(-1)[:: max(each.numel() // VALUES, 1)] for _, each in chosen]
        tried = [each.grad.view(-1)[:: max(each.numel() // VALUES, 1)] != 0 for _, each in chosen]
        return Compared([name for name, _ in chosen], weights, [each.clone() for each in weights], tried)


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

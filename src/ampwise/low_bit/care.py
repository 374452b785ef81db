"""Optimizers whose small updates reach BF16 weights: whoever warns of updates that are lost asks here first."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

__all__ = ["looked_after", "rounds_by_chance", "small_updates_count"]

looked_after: WeakSet[Any] = WeakSet()  # by a fitting of ours


def rounds_by_chance(optimizer: Any) -> bool:
    """Whether it can round BF16 weights by chance itself, as torchao's optimizers can when they are told to."""
    return hasattr(optimizer, "bf16_stochastic_round")


def small_updates_count(optimizer: Any) -> bool:
    """Whether an update below half a step of BF16 has an effect, now or on average."""
    # By identity: an optimizer may have any notion of what it is equal to.
    return any(each is optimizer for each in looked_after) or bool(getattr(optimizer, "bf16_stochastic_round", False))

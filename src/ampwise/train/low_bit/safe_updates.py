"""Which optimizers do not lose small updates of BF16 weights; checked before a warning about lost updates."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

__all__ = ["PROTECTED_OPTIMIZERS", "has_stochastic_rounding", "keeps_small_updates"]

PROTECTED_OPTIMIZERS: WeakSet[Any] = WeakSet()  # optimizers whose updates ampwise rounds itself ("bf16-pure")


def has_stochastic_rounding(optimizer: Any) -> bool:
    """Return whether it has stochastic rounding of its own for BF16 weights, as torchao's optimizers have."""
    return hasattr(optimizer, "bf16_stochastic_round")


def keeps_small_updates(optimizer: Any) -> bool:
    """Return whether an update of less than half a BF16 step has an effect, at once or on average."""
    # By identity: an optimizer may define __eq__.
    return any(each is optimizer for each in PROTECTED_OPTIMIZERS) or bool(
        getattr(optimizer, "bf16_stochastic_round", False)
    )

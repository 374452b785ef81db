"""The scaler's state for each optimizer, dropped with the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from ampwise.train.scaler.checked_gradients import CheckedGradients
from ampwise.train.scaler.grad_stats import GradStats
from ampwise.train.scaler.gradients import versions_of
from ampwise.train.scaler.step_result import StepResult

__all__ = ["ScalerOptimizerState", "ScalerOptimizerStates"]


class ScalerOptimizerState:
    """State of one optimizer: its checked gradients in this iteration, and the result of its last step."""

    def __init__(self, key: int, refer: Callable[[], Any], *, weakly: bool) -> None:
        self.key = key  # the optimizer's id(), which torch's scaler uses too
        self._refer, self.weakly = refer, weakly
        self.checked: CheckedGradients | None = None  # the gradients as checked in this iteration
        self.flags: list[Tensor] = []  # found_inf as published in torch's per-optimizer state
        self.flag_versions: list[int] | None = []
        self.unscaled = False  # unscale_() was called, with scaling off
        self.stats: GradStats | None = None  # statistics of the last step, for ``census``
        self.outcome: StepResult | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer; None once it is deleted."""
        return self._refer()

    def shows(self, flags: Sequence[Tensor]) -> bool:
        """Return whether these are the published flags, unchanged."""
        same = len(flags) == len(self.flags) and all(map(is_, flags, self.flags))
        return same and versions_of(flags) == self.flag_versions

    def reset(self) -> None:
        """Reset for the next iteration."""
        self.checked, self.unscaled = None, False


class ScalerOptimizerStates:
    """States of all optimizers, by ``id()`` as in torch: optimizers need not be hashable or weakly referable."""

    def __init__(self) -> None:
        self._by_id: dict[int, ScalerOptimizerState] = {}

    def of(self, optimizer: Any) -> ScalerOptimizerState:
        """Return the optimizer's state, created on first use."""
        entry = self._by_id.get(id(optimizer))
        if entry is None or entry.optimizer is not optimizer:
            entry = self._by_id[id(optimizer)] = self._new(optimizer)
        return entry

    def __iter__(self) -> Iterator[ScalerOptimizerState]:
        return iter([entry for entry in self._by_id.values() if entry.optimizer is not None])

    def drop_unstepped(self, but: Sequence[ScalerOptimizerState]) -> None:
        """Drop states that hold their optimizer strongly, unless it was stepped in this iteration."""
        for key, entry in list(self._by_id.items()):
            if not entry.weakly and entry not in but:
                del self._by_id[key]

    def _new(self, optimizer: Any) -> ScalerOptimizerState:
        key, by_id = id(optimizer), self._by_id
        try:
            return ScalerOptimizerState(key, weakref.ref(optimizer, lambda gone: by_id.pop(key, None)), weakly=True)
        except TypeError:
            return ScalerOptimizerState(key, lambda: optimizer, weakly=False)

"""Copies of a model in 16 bits that the script updates in place, such as a running average of the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.finding.call_site import CallSite
from ampwise.trace.call_site import calling_site
from ampwise.watch.inspection import HALVES, PRECISIONS
from ampwise.watch.learning import HalfAverage, Learning
from ampwise.watch.sampled_values import SampledValues, is_plain

__all__ = ["HalfAverages"]

FIRST, LAST = 8, 72  # steps between which the values are compared
TENSORS = 16
UPDATED = 32  # times in place, at least


class HalfAverages:
    """Models that were converted to 16 bits, and whether in-place updates change them."""

    def __init__(self, facts: Learning) -> None:
        self._facts = facts
        self._converted: dict[int, tuple[weakref.ref[nn.Module], CallSite]] = {}
        self._looked_at: list[
            tuple[weakref.ref[nn.Module], CallSite, list[Tensor], list[int], list[SampledValues]]
        ] = []

    def converted(self, model: nn.Module) -> None:
        first = next(nn.Module.parameters(model), None)
        if first is not None and PRECISIONS.get(first.dtype) in HALVES:
            self._converted[id(model)] = (weakref.ref(model), calling_site())

    def step_over(self, step: int, is_held: Callable[[Tensor], bool]) -> None:
        """Take values of the copies at one step, and compare them at a later one."""
        if not self._converted or step not in (FIRST, LAST):
            return
        with torch.no_grad():
            if step == LAST:
                for looked_at in self._looked_at:
                    self._compare(*looked_at)
                self._looked_at = []
                return
            for refer, site in self._converted.values():
                model = refer()
                own: list[Tensor] = []
                if model is not None:
                    own += [each for each in nn.Module.parameters(model) if is_plain(each)][:TENSORS]
                if own and not any(is_held(each) or each.grad is not None for each in own):
                    versions = [each._version for each in own]
                    self._looked_at.append((refer, site, own, versions, [SampledValues(each) for each in own]))

    def _compare(self, refer: Any, site: CallSite, own: list[Any], versions: list[int], values: list[Any]) -> None:
        model = refer()
        updates = min(each._version - before for each, before in zip(own, versions, strict=True))
        if model is None or updates < UPDATED:
            return
        self._facts.averages.append(
            HalfAverage(
                model=type(model).__name__,
                precision=PRECISIONS[own[0].dtype],
                site=site,
                updates=updates,
                values=sum(each.count for each in values),
                moved=int(sum(each.changed().read()[0] for each in values)),
            )
        )

"""Observe clips over more parameters than the optimizer has: the gradients of the others count in the norm, too."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampwise.trace.call_site import calling_site
from ampwise.train.scaler.step_result import AsyncScalars
from ampwise.watch.inspection import parameters_of
from ampwise.watch.learning import WideClip
from ampwise.watch.tracked import TrackedOptimizer
from ampwise.watch.tracker import CallTracker

__all__ = ["WideClips"]


class WideClips:
    """Clips over parameters that no optimizer has, and what becomes of their gradients."""

    def __init__(self, tracker: CallTracker) -> None:
        self._tracker = tracker
        self._outside: dict[int, weakref.ref[Tensor]] = {}
        self._facts: WideClip | None = None
        self._since_clip = False  # no backward pass has begun since the last such clip
        self._pending: list[tuple[AsyncScalars, Any]] = []

    def clipped(
        self,
        parameters: list[Any],
        owners: list[tuple[Any, TrackedOptimizer]],
        limit: float | None,
        *,
        look: bool,
    ) -> None:
        """Compare the norms of both kinds of gradients before a clip. look: at which parameters there are, too."""
        graded = [each for each in parameters if each.grad is not None]
        if look and owners:
            held = {id(each) for optimizer, _ in self._tracker.optimizers.pairs() for each in parameters_of(optimizer)}
            self._outside = {id(each): weakref.ref(each) for each in graded if id(each) not in held}
        if not self._outside or not owners or limit is None:
            return
        outside = [each for each in graded if self._is_outside(each)]
        inside = [each for each in graded if not self._is_outside(each)]
        plain = all(each.grad.layout == torch.strided and not hasattr(each.grad, "placements") for each in graded)
        if not outside or not inside or not plain or len({each.grad.device for each in graded}) > 1:
            return
        if self._facts is None:
            self._facts = WideClip(site=calling_site(), limit=limit)
        self._facts.scaled |= any(each.event.scaled for _, state in owners for each in state.pending)
        compares = all(state.scaled is None for _, state in owners)  # else all of it is off by the scale
        with torch.no_grad():
            norms = [_norm(inside), _norm(outside)]
        step = max(state.steps for _, state in owners) + 1
        self._pending.append((AsyncScalars(torch.stack(norms)), partial(self._compare, limit, step, compares)))
        self._since_clip = True
        self.settle()

    def backward_begins(self) -> None:
        """See whether anything has cleared the gradients since the last clip."""
        if not self._since_clip or self._facts is None:
            return
        self._since_clip = False
        left = [each.grad for ref in self._outside.values() if (each := ref()) is not None and each.grad is not None]
        if not left:
            self._facts.cleared += 1
        elif all(each.layout == torch.strided and each.device == left[0].device for each in left):
            with torch.no_grad():
                kept = torch.stack([(each != 0).any() for each in left]).any().float()
            self._pending.append((AsyncScalars(kept.reshape(1)), self._note_kept))

    def over(self, keys: Iterable[int]) -> WideClip | None:
        """Return the facts if any of these parameters, given by their ids, took part."""
        return self._facts if any(key in self._outside for key in keys) else None

    def settle(self, *, wait: bool = False) -> None:
        """Take the numbers that have arrived."""
        ready = [each for each in self._pending if wait or each[0].arrived]
        self._pending = [each for each in self._pending if each not in ready]
        for numbers, take in ready:
            take(numbers.read())

    def _is_outside(self, parameter: Any) -> bool:
        known = self._outside.get(id(parameter))
        return known is not None and known() is parameter

    def _compare(self, limit: float, step: int, compares: bool, norms: list[float]) -> None:
        inside, outside = norms
        assert self._facts is not None
        if not math.isfinite(outside):
            self._facts.first_bad = self._facts.first_bad or step
            self._facts.spread += math.isfinite(inside)
        elif compares and math.isfinite(inside) and (norm := math.hypot(inside, outside)) > limit:
            self._facts.effective.append(limit * inside / norm)
            self._facts.effective = [min(self._facts.effective), max(self._facts.effective)]

    def _note_kept(self, numbers: list[float]) -> None:
        assert self._facts is not None
        if numbers[0]:
            self._facts.kept += 1
        else:
            self._facts.cleared += 1


def _norm(parameters: list[Any]) -> Tensor:
    norm: Tensor = torch.stack(torch._foreach_norm([each.grad.float() for each in parameters])).norm()
    return norm

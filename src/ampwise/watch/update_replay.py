"""Replay an update of an optimizer that is not torch's own, if it spoils the weights.

Torch's optimizers are known, and explained by their settings. Of others, the weights and the state before each step are
copied on the CPU, so that the step can be made once more under the op recorder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.trace.diagnosis import diagnose
from ampwise.trace.failure import Failure
from ampwise.trace.ranks import collectives_refused
from ampwise.trace.replay import ReplaySettings, ReplayStep, is_finite
from ampwise.watch.inspection import parameters_of

__all__ = ["KeptUpdate"]

MOST_COPIED = 2**26  # bytes of weights and state


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """Weights, gradients and state of an optimizer before a step."""

    weights: list[Tensor]
    copies: list[tuple[Tensor, Tensor]]  # of weights, gradients and state: the tensor, and its copy
    state: list[tuple[Any, dict[str, Any]]]  # entries by parameter

    @classmethod
    def before(cls, optimizer: Any) -> KeptUpdate | None:
        """Copy what a step may change; None if that is too much, not on the CPU, or not finite already."""
        weights = [each for each in parameters_of(optimizer) if each.grad is not None]
        state = [
            (parameter, dict(entries)) for parameter, entries in optimizer.state.items() if isinstance(entries, dict)
        ]
        held = [each for _, entries in state for each in entries.values() if isinstance(each, Tensor)]
        tensors = [*weights, *[each.grad for each in weights], *held]
        if not all(each.is_cpu and each.layout == torch.strided and type(each.data) is Tensor for each in tensors):
            return None
        if sum(each.nbytes for each in tensors) > MOST_COPIED or not all(map(is_finite, tensors)):
            return None
        return cls(weights, [(each.detach(), each.detach().clone()) for each in tensors], state)

    @property
    def is_bad(self) -> bool:
        """Return whether the step has left weights that are not finite."""
        return not all(map(is_finite, self.weights))

    def diagnose(self, optimizer: Optimizer, number: int) -> Failure | None:
        """Make the step once more, and find the operation that spoiled the weights."""
        bad = [each for each in self.weights if not is_finite(each)]

        def run(settings: ReplaySettings) -> list[Tensor]:
            with torch.no_grad():
                for tensor, copy in self.copies:
                    tensor.copy_(copy)
            optimizer.state.clear()
            optimizer.state.update({parameter: dict(entries) for parameter, entries in self.state})
            with collectives_refused():  # other ranks may not replay theirs
                optimizer.step()
            return bad

        after = list(optimizer.state.items())
        try:
            found = diagnose(ReplayStep(run=run, device=torch.device("cpu"), step=number, touched=(optimizer,)))
            if found is None:
                return None
            trials = tuple(replace(each, loss=None) for each in found.trials)
            return found.but(symptom="weights", loss=None, trials=trials)
        finally:
            optimizer.state.clear()
            optimizer.state.update(after)

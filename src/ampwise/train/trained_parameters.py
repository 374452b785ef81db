"""An engine's optimizers, their parameters, and the gradients of these."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

__all__ = ["TrainedParameters"]


class TrainedParameters:
    """Optimizers that step together, and their parameters, which may be added to at any time."""

    def __init__(self, optimizers: Sequence[Optimizer], models: Sequence[Module]) -> None:
        self.optimizers = list(optimizers)
        everything = [id(parameter) for model in models for parameter in model.parameters()]
        self._places = {identity: place for place, identity in enumerate(everything)}
        held = {id(parameter) for parameter in self.parameters}
        # Gradients of parameters without an optimizer must be dropped too, or they would add up for ever.
        self._others = [each for model in models for each in model.parameters() if id(each) not in held]

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters that the optimizers hold, optimizer by optimizer."""
        return [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]

    def in_model_order(self) -> list[Parameter]:
        """Return the optimizers' parameters in the order of ``model.parameters()``, then those added later."""
        return sorted(self.parameters, key=lambda each: self._places.get(id(each), len(self._places)))

    @property
    def all_parameters(self) -> list[Parameter]:
        """Parameters that may receive gradients, with and without an optimizer."""
        return self.parameters + self._others

    @property
    def has_gradients(self) -> bool:
        return bool(self.optimizers_with_gradients)

    def gradient_versions(self) -> list[tuple[int, int] | None]:
        """Return identity and version of each gradient, which show any change."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [None if each is None else (id(each), each._version) for each in gradients]

    @property
    def optimizers_with_gradients(self) -> list[Optimizer]:
        """Optimizers with at least one gradient."""
        return [
            each
            for each in self.optimizers
            if any(parameter.grad is not None for group in each.param_groups for parameter in group["params"])
        ]

    @property
    def lrs(self) -> list[float | Tensor]:
        """Learning rates of all parameter groups, optimizer by optimizer."""
        return [group.get("lr", math.nan) for optimizer in self.optimizers for group in optimizer.param_groups]

    def drop_gradients(self) -> None:
        for parameter in self.all_parameters:
            parameter.grad = None  # checking for a gradient first takes as long

    def clear_gradients(self) -> None:
        """Set gradients to zero in place."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        for parameter in self._others:
            parameter.grad = None

    def before_saving(self, method: Callable[[], None]) -> None:
        """Call a method before ``optimizer.state_dict``, as long as the method's object lives."""
        self._hook("register_state_dict_pre_hook", method)

    def before_stepping(self, method: Callable[[], None]) -> None:
        """Call a method before ``optimizer.step``, as long as the method's object lives."""
        self._hook("register_step_pre_hook", method)

    def _hook(self, register: str, method: Callable[[], None]) -> None:
        alive: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(method)

        def call(*_: Any) -> None:
            still = alive()
            if still is not None:
                still()

        for optimizer in self.optimizers:
            if hasattr(optimizer, register):  # optimizers that are not torch's may lack it
                hook = getattr(optimizer, register)(call)
                weakref.finalize(self, hook.remove)

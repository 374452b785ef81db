"""What an engine trains: the optimizers, the parameters they hold, and the gradients of these."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

__all__ = ["Trained"]


class Trained:
    """Optimizers that step together. Parameters may be added to them at any time."""

    def __init__(self, optimizers: Sequence[Optimizer], models: Sequence[Module]) -> None:
        self.optimizers = list(optimizers)
        everything = [id(parameter) for model in models for parameter in model.parameters()]
        self._places = {identity: place for place, identity in enumerate(everything)}
        held = {id(parameter) for parameter in self.parameters}
        # Gradients of parameters that no optimizer has would add up for ever.
        self._others = [each for model in models for each in model.parameters() if id(each) not in held]

    @property
    def parameters(self) -> list[Parameter]:
        """Those that optimizers hold, of one after the other."""
        return [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]

    def in_model_order(self) -> list[Parameter]:
        """Those that optimizers hold, as ``model.parameters()`` has them; then those added later."""
        return sorted(self.parameters, key=lambda each: self._places.get(id(each), len(self._places)))

    @property
    def all_parameters(self) -> list[Parameter]:
        """Those besides that may get gradients."""
        return self.parameters + self._others

    @property
    def has_gradients(self) -> bool:
        return bool(self.with_gradients)

    def stock(self) -> list[tuple[int, int] | None]:
        """Which gradients there are, and in which state: any change of them by someone shows."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [None if each is None else (id(each), each._version) for each in gradients]

    @property
    def with_gradients(self) -> list[Optimizer]:
        """Optimizers with something to do."""
        return [
            each
            for each in self.optimizers
            if any(parameter.grad is not None for group in each.param_groups for parameter in group["params"])
        ]

    @property
    def lrs(self) -> list[float | Tensor]:
        """The learning rates of all groups, of one optimizer after the other."""
        return [group.get("lr", math.nan) for optimizer in self.optimizers for group in optimizer.param_groups]

    def drop_gradients(self) -> None:
        for parameter in self.all_parameters:
            parameter.grad = None  # asking whether there is one takes as long

    def clear_gradients(self) -> None:
        """Set them to zero, in the memory they have."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        for parameter in self._others:
            parameter.grad = None

    def before_saving(self, method: Callable[[], None]) -> None:
        """Call the method of an object before an optimizer's state is asked for, as long as the object lives."""
        self._hook("register_state_dict_pre_hook", method)

    def before_stepping(self, method: Callable[[], None]) -> None:
        """The same, before an optimizer steps."""
        self._hook("register_step_pre_hook", method)

    def _hook(self, register: str, method: Callable[[], None]) -> None:
        alive: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(method)

        def call(*_: Any) -> None:
            still = alive()
            if still is not None:
                still()

        for optimizer in self.optimizers:
            if hasattr(optimizer, register):  # those that are not torch's may have none
                hook = getattr(optimizer, register)(call)
                weakref.finalize(self, hook.remove)

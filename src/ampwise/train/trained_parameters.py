"""An engine's optimizers, their parameters, and the gradients of these."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ampwise.train.scaler.step_result import AsyncScalars

__all__ = ["TrainedParameters"]


class TrainedParameters:
    """Optimizers that step together, and their parameters, which may be added to at any time."""

    def __init__(self, optimizers: Sequence[Optimizer], models: Sequence[Module]) -> None:
        self.optimizers = list(optimizers)
        everything = [id(parameter) for model in models for parameter in model.parameters()]
        self._recorded: list[tuple[int, int] | None] | None = None  # identity and version of each gradient
        # Parameters in the optimizers' order, and in the models'.
        self._ordered: tuple[list[Parameter], list[Parameter]] | None = None
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
        given = self.parameters
        if self._ordered is None or len(given) != len(self._ordered[0]) or not all(map(is_, given, self._ordered[0])):
            ordered = sorted(given, key=lambda each: self._places.get(id(each), len(self._places)))
            self._ordered = given, ordered
        return self._ordered[1]

    @property
    def all_parameters(self) -> list[Parameter]:
        """Parameters that may receive gradients, with and without an optimizer."""
        return self.parameters + self._others

    def record_gradients(self) -> None:
        """Record the gradients as they are, for ``gradients_changed``."""
        self._recorded = self._versions()

    def gradients_changed(self) -> bool:
        """Return whether gradients came, went or were written to since they were recorded or dropped."""
        if self._recorded is not None:
            return self._recorded != self._versions()
        return any(map(_has_gradient, self.optimizers))

    def _versions(self) -> list[tuple[int, int] | None]:
        gradients = [parameter.grad for parameter in self.parameters]
        return [None if each is None else (id(each), each._version) for each in gradients]

    def on_cpu(self) -> bool:
        """Return whether all gradients are plain dense tensors on the CPU: not shards, whose norm spans ranks."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is not Tensor or not gradient.is_cpu or gradient.layout is not torch.strided:
                return False
        return True

    @property
    def optimizers_with_gradients(self) -> list[Optimizer]:
        """Optimizers with at least one gradient."""
        return list(filter(_has_gradient, self.optimizers))

    def lrs(self) -> list[float | AsyncScalars]:
        """Return the learning rates of all parameter groups; those on a device are on their way to the host."""
        found: list[float | AsyncScalars] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                lr = group.get("lr", math.nan)
                found.append(AsyncScalars(lr.detach().reshape(1)) if isinstance(lr, Tensor) else lr)
        return found

    def drop_gradients(self) -> None:
        self._recorded = None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # checking for a gradient first takes as long
        for parameter in self._others:
            parameter.grad = None

    def hook(self, register: str, function: Callable[..., None]) -> None:
        """Register a function as a hook of all optimizers, as long as this object lives."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, register):  # optimizers that are not torch's may lack it
                weakref.finalize(self, getattr(optimizer, register)(function).remove)


def _has_gradient(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False

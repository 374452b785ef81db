"""What a pass may change, put back as it was: buffers and random numbers. Weights it must not change at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.errors import AmpwiseError, BadInput
from ampwise.randomness import captured, restore_random
from ampwise.trace.undo import overwrite
from ampwise.user_code import failure

__all__ = ["Unchanged", "told_if_it_fails"]


@contextmanager
def told_if_it_fails(on: str = "the first batch") -> Iterator[None]:
    """Around calls of the user's function in FP32: what it raises, in a line, with where."""
    try:
        yield
    except (AmpwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(f"search(): the function failed in FP32 on {on}: {failure(error)}.") from error


class _Kept(NamedTuple):
    module: Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


class Unchanged:
    """A model as it is now, and the random numbers that come next: every pass begins with these."""

    def __init__(self, model: Module, device: torch.device) -> None:
        self._device = device
        self._random = captured(device)
        self._buffers = [
            _Kept(module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self._parameters = [(parameter, parameter._version, parameter.grad) for parameter in model.parameters()]

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Around a pass: it starts from the same numbers each time, and leaves no trace."""
        restore_random(self._random, self._device)
        try:
            yield
        finally:
            self.put_back()
        self._refuse_changes()

    def put_back(self) -> None:
        """Buffers and random numbers as they were."""
        restore_random(self._random, self._device)
        for kept in self._buffers:
            kept.module._buffers[kept.name] = kept.buffer
            # Normalisation layers write to theirs without counting it.
            if kept.buffer._version != kept.version or isinstance(kept.module, _NormBase):
                overwrite(kept.buffer, kept.copy)

    def _refuse_changes(self) -> None:
        if any(parameter._version != version for parameter, version, _ in self._parameters):
            raise BadInput(
                "search(): the function changes the weights itself. It is to return the loss, and nothing more: no "
                "optimizer in it."
            )
        if any(parameter.grad is not gradient for parameter, _, gradient in self._parameters):
            for parameter, _, gradient in self._parameters:
                parameter.grad = gradient
            raise BadInput("search(): the function must not call backward() itself: it returns the loss.")

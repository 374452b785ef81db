"""Restore what a pass may change: buffers and random number generators. Weights must not change at all."""

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
from ampwise.trace.undo import overwrite
from ampwise.trace.user_code import describe_error
from ampwise.train.random_state import capture_random, restore_random

__all__ = ["SavedState", "errors_in_one_line"]


@contextmanager
def errors_in_one_line(on: str = "the first batch") -> Iterator[None]:
    """Turn errors of the user's function in FP32 into one line with their location."""
    try:
        yield
    except (AmpwiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadInput(f"search(): the function failed in FP32 on {on}: {describe_error(error)}.") from error


class _SavedBuffer(NamedTuple):
    module: Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


class SavedState:
    """State of a model and of random number generators; every pass starts from it."""

    def __init__(self, model: Module, device: torch.device) -> None:
        self._device = device
        self._random = capture_random(device)
        self._buffers = [
            _SavedBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self._parameters = [(parameter, parameter._version, parameter.grad) for parameter in model.parameters()]

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Run a pass from the saved state, and restore it afterwards."""
        restore_random(self._random, self._device)
        try:
            yield
        finally:
            self.put_back()
        self._refuse_changes()

    def put_back(self) -> None:
        """Restore buffers and random number generators."""
        restore_random(self._random, self._device)
        for saved in self._buffers:
            saved.module._buffers[saved.name] = saved.buffer
            # Normalisation layers update their buffers without changing the version.
            if saved.buffer._version != saved.version or isinstance(saved.module, _NormBase):
                overwrite(saved.buffer, saved.copy)

    def _refuse_changes(self) -> None:
        if any(parameter._version != version for parameter, version, _ in self._parameters):
            raise BadInput(
                "search(): the function changes the weights. It must only return the loss, without an optimizer step."
            )
        if any(parameter.grad is not gradient for parameter, _, gradient in self._parameters):
            for parameter, _, gradient in self._parameters:
                parameter.grad = gradient
            raise BadInput("search(): the function must not call backward(): it only returns the loss.")

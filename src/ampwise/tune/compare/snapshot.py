"""Snapshots of what training changes in a model, so that a precision that diverges does not affect the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["ModelSnapshot", "StateSnapshot", "are_finite"]


class StateSnapshot:
    """Copy of a model's buffers, by name: a forward pass may add some, or replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved = {name: buffer.detach().clone() for name, buffer in _writable_buffers(model)}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers that still exist with the same shape."""
        for name, buffer in _writable_buffers(self._model):
            saved = self._saved.get(name)
            if saved is not None and saved.shape == buffer.shape:
                buffer.copy_(saved)


class ModelSnapshot:
    """Copy of weights, buffers and the optimizer's state, in the host's memory, as the device's may be full."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._weights = [(weight, weight.detach().to("cpu", copy=True)) for weight in model.parameters()]
        self._buffers, self._optimizer = StateSnapshot(model), optimizer
        self._state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())  # before the first step, next to nothing

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights, buffers and the optimizer's state."""
        for weight, saved in self._weights:
            weight.copy_(saved)
        self._buffers.restore()
        self._optimizer.load_state_dict(copy.deepcopy(self._state))


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are finite. Syncs the device once."""
    found = [torch.isfinite(_values(tensor)).all() for tensor in tensors]
    return all(bool(each) for each in torch.stack(found).cpu()) if found else True


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach()._values() if tensor.is_sparse else tensor.detach()


def _writable_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that can be written: not expanded ones, whose elements share memory, nor uninitialized ones."""
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            continue
        shared = any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if not shared:
            yield name, buffer

"""What training changes in a model, kept aside: a precision that spoils it does not spoil it for the others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["Buffers", "Snapshot", "are_finite"]


class Buffers:
    """The buffers of a model as they are now, by their names: a forward pass may add some, or replace them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved = {name: buffer.detach().clone() for name, buffer in _written(model)}

    @torch.no_grad()
    def restore(self) -> None:
        """Those that are still there, in the same shape."""
        for name, buffer in _written(self._model):
            saved = self._saved.get(name)
            if saved is not None and saved.shape == buffer.shape:
                buffer.copy_(saved)


class Snapshot:
    """Weights, buffers and the optimizer's state; in the host's memory, as the device's may be full."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._weights = [(weight, weight.detach().to("cpu", copy=True)) for weight in model.parameters()]
        self._buffers, self._optimizer = Buffers(model), optimizer
        self._state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())  # before the first step, next to nothing

    @torch.no_grad()
    def restore(self) -> None:
        """As it was then."""
        for weight, saved in self._weights:
            weight.copy_(saved)
        self._buffers.restore()
        self._optimizer.load_state_dict(copy.deepcopy(self._state))


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all of their values are. Waits for the device once."""
    found = [torch.isfinite(_values(tensor)).all() for tensor in tensors]
    return all(bool(each) for each in torch.stack(found).cpu()) if found else True


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach()._values() if tensor.is_sparse else tensor.detach()


def _written(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a pass can write to: not one whose elements share their place, nor one that is yet to be made."""
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            continue
        shared = any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if not shared:
            yield name, buffer

"""Padding for an embedding whose weight the model's code also multiplies with, to get logits without a head layer.

There is then no module call to change, only ``F.linear(x, self.wte.weight)`` or ``x @ self.wte.weight.T``. So
``weight`` returns a tensor of the unpadded rows that multiplies with the padded ones. Any other operation uses the
unpadded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampwise.tune.align.layers import PaddedEmbedding, crop_to, layer_outputs, pad_columns, pad_to

__all__ = ["TiedEmbedding"]


class TiedEmbedding(PaddedEmbedding):
    """Padded embedding whose weight also makes the logits; ``parameters()`` has the padded parameter."""

    logits: str  # sliced or masked; ``gives`` applies to lookups

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpadded rows."""
        whole = self._parameters["weight"]
        assert whole is not None
        shown = crop_to(whole, (self.num_embeddings, self.embedding_dim)).as_subclass(_OwnRows)
        shown.whole, shown.logits = whole, self.logits
        return shown


class _OwnRows(Tensor):
    """A weight without its padding; matmuls and lookups use the padded one."""

    whole: Tensor
    logits: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_PADDING and len(args) > 1 and isinstance(args[1], cls):
            return _WITH_PADDING[func](*args, **kwargs)
        if func in _ON_WEIGHT and len(args) == 1 and not kwargs:
            return _ON_WEIGHT[func](args[0])
        if func in _WRITES and isinstance(args[0], cls):
            return _WRITES[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class _TransposedRows(Tensor):
    """The transpose of an ``_OwnRows``."""

    weight: _OwnRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MATMULS and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return _logits(args[0], args[1].weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _logits(inputs: Tensor, weight: _OwnRows, bias: Tensor | None = None) -> Tensor:
    rows, columns = weight.whole.shape
    wide = pad_columns(inputs, weight.shape[1], columns)
    made = F.linear(wide, weight.whole, bias if bias is None else pad_to(bias, (rows,)))
    return layer_outputs(made, weight.shape[0], weight.logits)


def _looked_up(tokens: Tensor, weight: _OwnRows, *rest: Any, **options: Any) -> Tensor:
    index, *others = rest or (options.pop("padding_idx", None),)
    if index is not None and index < 0:  # counted from the end of the unpadded rows
        index += weight.shape[0]
    return F.embedding(tokens, weight.whole, index, *others, **options)


def _gradient(weight: _OwnRows) -> Tensor | None:
    return None if weight.whole.grad is None else crop_to(weight.whole.grad, tuple(weight.shape))


def _set_data(weight: _OwnRows, data: Tensor) -> None:
    weight.whole.data = pad_to(data, tuple(weight.whole.shape))


def _set_gradient(weight: _OwnRows, gradient: Tensor | None) -> None:
    weight.whole.grad = None if gradient is None else pad_to(gradient, tuple(weight.whole.shape))


def _set_trained(weight: _OwnRows, requires_grad: bool = True) -> _OwnRows:
    weight.whole.requires_grad_(requires_grad)
    return weight


def _hooked(weight: _OwnRows, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook that sees, and may return, the gradient of the unpadded rows."""
    own, shape = tuple(weight.shape), tuple(weight.whole.shape)

    def on_whole(gradient: Tensor) -> Tensor | None:
        changed = hook(crop_to(gradient, own))
        return None if changed is None else pad_to(changed, shape)

    return weight.whole.register_hook(on_whole)


def _transposed(weight: _OwnRows) -> _TransposedRows:
    with torch._C.DisableTorchFunctionSubclass():
        transposed = weight.t().as_subclass(_TransposedRows)
    transposed.weight = weight
    return transposed


_WITH_PADDING: dict[Any, Callable[..., Any]] = {F.linear: _logits, F.embedding: _looked_up}
_ON_WEIGHT: dict[Any, Callable[[_OwnRows], Any]] = {
    Tensor.grad.__get__: _gradient,  # type: ignore[union-attr]
    Tensor.T.__get__: _transposed,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _transposed,  # type: ignore[attr-defined]
    Tensor.t: _transposed,
    torch.t: _transposed,
}
# Writes to the weight go to the parameter, of which it is a view.
_WRITES: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_gradient,  # type: ignore[union-attr]
    Tensor.grad.__delete__: lambda weight: _set_gradient(weight, None),  # type: ignore[union-attr]
    Tensor.requires_grad.__set__: _set_trained,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_trained,
    Tensor.register_hook: _hooked,
}
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

"""An embedding whose weight the model's code also multiplies with, to get its logits, without a layer of their own.

There is no call of a module to change then, only ``F.linear(x, self.wte.weight)``, or ``x @ self.wte.weight.T``. So the
weight that such code asks for is a tensor of the embedding's own rows, which knows the padded ones and multiplies with
those. Whatever else is done with it is done with its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampwise.tune.align.layers import PaddedEmbedding, given, narrowed, widened, with_columns

__all__ = ["TiedEmbedding"]


class TiedEmbedding(PaddedEmbedding):
    """Such an embedding. Its parameter, with padding, is what ``parameters()`` has."""

    logits: str  # sliced or masked: ``gives`` is about what it looks up

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The embedding's own rows."""
        whole = self._parameters["weight"]
        assert whole is not None
        shown = narrowed(whole, (self.num_embeddings, self.embedding_dim)).as_subclass(_OwnRows)
        shown.whole, shown.logits = whole, self.logits
        return shown


class _OwnRows(Tensor):
    """A weight without its padding, which products and lookups take with it."""

    whole: Tensor
    logits: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_PADDING and len(args) > 1 and isinstance(args[1], cls):
            return _WITH_PADDING[func](*args, **kwargs)
        if func in _OF_ITSELF and len(args) == 1 and not kwargs:
            return _OF_ITSELF[func](args[0])
        if func in _WRITES and isinstance(args[0], cls):
            return _WRITES[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class _Turned(Tensor):
    """The same with its columns for rows."""

    weight: _OwnRows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and isinstance(args[1], cls) and not kwargs:
            return _logits(args[0], args[1].weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _logits(inputs: Tensor, weight: _OwnRows, bias: Tensor | None = None) -> Tensor:
    rows, columns = weight.whole.shape
    wide = with_columns(inputs, weight.shape[1], columns)
    made = F.linear(wide, weight.whole, bias if bias is None else widened(bias, (rows,)))
    return given(made, weight.shape[0], weight.logits)


def _looked_up(tokens: Tensor, weight: _OwnRows, *rest: Any, **options: Any) -> Tensor:
    index, *others = rest or (options.pop("padding_idx", None),)
    if index is not None and index < 0:  # counted from the end of its own rows
        index += weight.shape[0]
    return F.embedding(tokens, weight.whole, index, *others, **options)


def _gradient(weight: _OwnRows) -> Tensor | None:
    return None if weight.whole.grad is None else narrowed(weight.whole.grad, tuple(weight.shape))


def _set_data(weight: _OwnRows, data: Tensor) -> None:
    weight.whole.data = widened(data, tuple(weight.whole.shape))


def _set_gradient(weight: _OwnRows, gradient: Tensor | None) -> None:
    weight.whole.grad = None if gradient is None else widened(gradient, tuple(weight.whole.shape))


def _set_trained(weight: _OwnRows, requires_grad: bool = True) -> _OwnRows:
    weight.whole.requires_grad_(requires_grad)
    return weight


def _hooked(weight: _OwnRows, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook is given the gradient of the embedding's own rows, and gives such a one."""
    own, shape = tuple(weight.shape), tuple(weight.whole.shape)

    def on_whole(gradient: Tensor) -> Tensor | None:
        changed = hook(narrowed(gradient, own))
        return None if changed is None else widened(changed, shape)

    return weight.whole.register_hook(on_whole)


def _turned(weight: _OwnRows) -> _Turned:
    with torch._C.DisableTorchFunctionSubclass():
        turned = weight.t().as_subclass(_Turned)
    turned.weight = weight
    return turned


_WITH_PADDING: dict[Any, Callable[..., Any]] = {F.linear: _logits, F.embedding: _looked_up}
_OF_ITSELF: dict[Any, Callable[[_OwnRows], Any]] = {
    Tensor.grad.__get__: _gradient,  # type: ignore[union-attr]
    Tensor.T.__get__: _turned,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _turned,  # type: ignore[attr-defined]
    Tensor.t: _turned,
    torch.t: _turned,
}
# What is written to the weight is written to the parameter, of which it is only a view.
_WRITES: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.grad.__set__: _set_gradient,  # type: ignore[union-attr]
    Tensor.grad.__delete__: lambda weight: _set_gradient(weight, None),  # type: ignore[union-attr]
    Tensor.requires_grad.__set__: _set_trained,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _set_trained,
    Tensor.register_hook: _hooked,
}
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

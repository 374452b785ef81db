"""``keep``: run a function in a precision of its own, whatever autocast is set to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from ampwise.errors import BadInput
from ampwise.train.precision.call_in_precision import call_in_precision, checked_precision

__all__ = ["keep"]

P = ParamSpec("P")
R = TypeVar("R")

RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def keep(precision: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to run in ``"fp32"``, ``"fp16"`` or ``"bf16"``, whatever autocast is set to.

    >>> import torch, ampwise
    >>> @ampwise.keep("fp32")
    ... def entropy(logits):
    ...     return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    >>> entropy(torch.zeros(4, dtype=torch.bfloat16)).dtype
    torch.float32

    For FP32, narrower tensors among the arguments, nested ones too, are cast to FP32, and autocast is off inside.
    ``torch.autocast(enabled=False)`` alone casts nothing, so 16-bit inputs would be computed in 16 bits. For a 16-bit
    dtype, autocast is on inside with that dtype. Gradients have the dtype of the arguments. Works on methods too, and
    torch.compile can trace it. For modules, see ``ampwise.Policy``.
    """
    if callable(precision):
        raise BadInput('keep() needs a precision: write @ampwise.keep("fp32").')
    name = checked_precision(f"keep({precision!r})", precision)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _refuse(f"keep({name!r})", function)

        @functools.wraps(function)
        def kept(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = call_in_precision(name, function, args, kwargs)
            return result

        return kept

    return decorate


def _refuse(asked: str, function: Any) -> None:
    """Raise for a class or module, and for a function that runs after its call has returned."""
    shown = getattr(function, "__qualname__", None) or type(function).__name__
    if isinstance(function, (type, nn.Module)):
        raise BadInput(
            f"{asked} of {shown}: expected a function, not a class or module. Keep a module by its name: "
            "ampwise.Policy(...).keep(precision, name), or put @ampwise.keep on its forward."
        )
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise BadInput(f"{asked} of {shown}: put @ampwise.keep below @{kind}, next to the function.")
    if not callable(function):
        raise BadInput(f"{asked} of {shown}: expected a function.")
    if any(runs_later(function) for runs_later in RUN_LATER):
        raise BadInput(
            f"{asked} of {shown}: a coroutine or generator runs after its call has returned, outside the precision. "
            "Keep the functions that it calls instead."
        )

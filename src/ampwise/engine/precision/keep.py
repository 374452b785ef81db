"""A function that is computed in a precision of its own, whatever autocast does around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from ampwise.engine.precision.region import call_in, checked
from ampwise.errors import BadInput

__all__ = ["keep"]

P = ParamSpec("P")
R = TypeVar("R")

RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def keep(precision: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compute a function in ``"fp32"``, ``"fp16"`` or ``"bf16"``, also where autocast would do otherwise.

    >>> import torch, ampwise
    >>> @ampwise.keep("fp32")
    ... def entropy(logits):
    ...     return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    >>> entropy(torch.zeros(4, dtype=torch.bfloat16)).dtype
    torch.float32

    For FP32, tensors of fewer bits among the arguments, nested ones too, are cast to FP32, and autocast is off
    inside. ``torch.autocast(enabled=False)`` alone does not cast, so what comes in 16 bits is computed in 16 bits.
    For a 16-bit type, autocast is on inside with that type. Gradients come back in the type of the arguments.
    Methods can be kept as functions are, and torch.compile traces it. For modules, see ``ampwise.Policy``.
    """
    if callable(precision):
        raise BadInput('keep() without a precision: write @ampwise.keep("fp32").')
    name = checked(f"keep({precision!r})", precision)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _refuse(f"keep({name!r})", function)

        @functools.wraps(function)
        def kept(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = call_in(name, function, args, kwargs)
            return result

        return kept

    return decorate


def _refuse(asked: str, function: Any) -> None:
    """What is not over when its call returns, or is more than one function."""
    shown = getattr(function, "__qualname__", None) or type(function).__name__
    if isinstance(function, (type, nn.Module)):
        raise BadInput(
            f"{asked} of {shown}: it keeps functions, not classes or modules. Keep a module by its name: "
            "ampwise.Policy(...).keep(precision, name), or put @ampwise.keep on its forward."
        )
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise BadInput(f"{asked} of {shown}: put @ampwise.keep below @{kind}, next to the function.")
    if not callable(function):
        raise BadInput(f"{asked} of {shown}: a function is expected.")
    if any(runs_later(function) for runs_later in RUN_LATER):
        raise BadInput(
            f"{asked} of {shown}: it runs after its call has returned, and so outside the region. "
            "Keep the functions that it calls instead."
        )

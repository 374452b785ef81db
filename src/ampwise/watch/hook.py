"""A hook that rides on the script's own objects and never stands in their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hook"]


class Hook:
    """Calls ``tell``; copies of a model share it, and a pickle of one has something harmless in its place.

    What torch.compile traces must have nothing of it, or graphs would break.
    """

    __name__ = "ampwise_hook"

    def __init__(self, tell: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._tell, self._failed = tell, failed

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._tell(*args)
        except Exception as error:  # ours, which the script must not learn of
            self._failed(error)

    def __deepcopy__(self, memo: object) -> Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes anything and does nothing: whoever loads it needs no ampwise.
        return getattr, (contextlib.nullcontext(), "__exit__")

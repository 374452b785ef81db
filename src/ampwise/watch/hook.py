"""A hook that rides on the script's own objects and never stands in their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ampwise.watch.rest import Rest

__all__ = ["Hook", "PacedHook"]


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


class PacedHook(Hook):
    """A hook that in steps that are passed over calls ``resting`` instead, and that counts its own time in others."""

    def __init__(
        self,
        tell: Callable[..., None],
        failed: Callable[[Exception], None],
        rest: Rest,
        resting: Callable[..., None],
    ) -> None:
        super().__init__(tell, failed)
        self._rest, self._resting = rest, resting

    def __call__(self, *args: Any) -> None:
        rest = self._rest
        if not rest.on and torch.compiler.is_compiling():  # in this order: a script that compiles has no rests
            return
        try:
            if rest.on:
                self._resting(*args)
                return
            began = rest.clock()
            self._tell(*args)
            rest.spent += rest.clock() - began
        except Exception as error:
            self._failed(error)

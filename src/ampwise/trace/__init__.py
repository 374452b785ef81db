"""Find the first operation that produced a NaN or an infinity, and why, by replaying the step.

``replay`` runs a ``ReplayStep`` again from the same state and restores everything afterwards; ``recorder`` writes each
operation's inputs and results on a ``Tape``, by their smallest and largest values (``value_ranges``); ``slicing``
follows a bad value back to the operation that produced it; ``op_inspection`` inspects the operations found;
``remedies`` proposes and tries fixes. ``diagnosis`` combines these into a ``Failure``. ``bad_steps`` is the callback by
which an Engine explains its bad steps, ``tracing`` the function for any other code.

The package is callable, because it shares its name with the function ``ampwise.trace``: ``help(ampwise.trace.trace)``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ampwise.errors import needs_torch


class _CallablePackage(ModuleType):
    """This package, callable like the function ``ampwise.trace``, whose name importing it takes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name != "trace":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            from ampwise.trace.tracing import trace
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise needs_torch("ampwise.trace") from error
        return trace


sys.modules[__name__].__class__ = _CallablePackage

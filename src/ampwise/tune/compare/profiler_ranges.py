"""Profiler ranges for the forward pass of each module, by which device time is assigned to modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from ampwise.train.precision.policy import named_modules

__all__ = ["SCOPE", "UPDATE", "module_of", "module_ranges"]

SCOPE = "ampwise::module::"
UPDATE = "ampwise::update"  # a range over clipping and the optimizer


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Record a range with the module's name for each call of a module."""
    opened: list[Any] = []

    def enters(name: str) -> Any:
        def enter(*_: Any) -> None:
            opened.append(record_function(f"{SCOPE}{name}"))
            opened[-1].__enter__()

        return enter

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    hooks = []
    for name, module in named_modules(model).items():
        hooks.append(module.register_forward_pre_hook(enters(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while opened:  # of a forward pass that failed
            leave()


def module_of(range_name: str) -> str | None:
    """Return the module whose range it is; None for other ranges.

    >>> module_of("ampwise::module::blocks.0"), module_of("aten::mm")
    ('blocks.0', None)
    """
    return range_name.removeprefix(SCOPE) if range_name.startswith(SCOPE) else None

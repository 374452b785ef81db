"""Ranges in a profile around the forward pass of each module, by which time is told to belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from ampwise.engine.precision.policy import named_modules

__all__ = ["SCOPE", "UPDATE", "module_of", "scopes_on"]

SCOPE = "ampwise::module::"
UPDATE = "ampwise::update"  # around clipping and the optimizer


@contextmanager
def scopes_on(model: nn.Module) -> Iterator[None]:
    """While inside, a call of a module is a range with its name."""
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
        while opened:  # of a pass that failed
            leave()


def module_of(range_name: str) -> str | None:
    """The module whose range it is; None of another.

    >>> module_of("ampwise::module::blocks.0"), module_of("aten::mm")
    ('blocks.0', None)
    """
    return range_name.removeprefix(SCOPE) if range_name.startswith(SCOPE) else None

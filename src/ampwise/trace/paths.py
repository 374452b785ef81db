"""Which module is running: its path in the model, by hooks that see every module for as long as they are on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampwise.engine.precision.policy import named_modules
from ampwise.engine.precision.region import DEVICE_TYPES
from ampwise.trace.kept import Attributes

__all__ = ["Paths", "autocast_here", "prefixes"]


class Paths:
    """The names of modules, and those that are running in this thread, the outermost first."""

    def __init__(self, models: Sequence[Module], attributes: Attributes) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[Module] = []  # whose ids are known: they must not go away
        self.any_ran = False
        self.precision = ""  # of autocast, where some module ran under it
        self._running = threading.local()
        self._attributes = attributes  # of models that are met only now, as they were then
        for prefix, model in zip(prefixes(models), models, strict=True):
            self._learn(model, prefix)

    def _learn(self, model: Module, prefix: str) -> None:
        self._kept.append(model)
        self._attributes.note([model])
        for name, module in named_modules(model).items():
            self._names.setdefault(id(module), ".".join(part for part in (prefix, name) if part))

    @property
    def roots(self) -> tuple[Module, ...]:
        """The outermost modules that ran."""
        return tuple(self._kept)

    @property
    def _stack(self) -> list[Module]:
        stack: list[Module] | None = getattr(self._running, "stack", None)
        if stack is None:
            stack = self._running.stack = []
        return stack

    def here(self) -> tuple[str, str]:
        """Path and class of the innermost module; the class alone of a model itself."""
        stack = self._stack
        return (self._names.get(id(stack[-1]), ""), type(stack[-1]).__name__) if stack else ("", "")

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(self._enters)
        after = register_module_forward_hook(self._leaves, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._stack.clear()

    def _enters(self, module: Module, args: Any) -> None:
        self.any_ran = True
        self.precision = self.precision or autocast_here()
        if id(module) not in self._names and not self._stack:
            self._learn(module, "")
        self._stack.append(module)

    def _leaves(self, module: Module, args: Any, result: Any) -> None:
        stack = self._stack
        while stack and stack.pop() is not module:  # modules that ended with an exception have not said so
            pass


def autocast_here() -> str:
    """What autocast casts to, on whatever device it is on: "fp16", "bf16"; "" where it is off."""
    for kind in DEVICE_TYPES:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return "fp16" if dtype == torch.float16 else "bf16" if dtype == torch.bfloat16 else ""
    return ""


def prefixes(models: Sequence[Module]) -> list[str]:
    """What the names of each model's modules begin with, where there are several: their class, or their number."""
    classes = [type(model).__name__ for model in models]
    if len(models) == 1:
        return [""]
    return classes if len(set(classes)) == len(classes) else [str(number) for number in range(len(models))]

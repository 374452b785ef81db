"""The modules that are running, their paths in the models, and autocast around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampwise.trace.python_state import PythonState
from ampwise.train.precision.call_in_precision import DEVICE_TYPES
from ampwise.train.precision.policy import named_modules

__all__ = ["ModulePaths", "current_autocast", "model_prefixes"]


class ModulePaths:
    """The paths of modules in their models, and the stack of modules that are running in this thread."""

    def __init__(self, models: Sequence[Module], attributes: PythonState) -> None:
        self.roots: list[Module] = []  # the models, and the outermost modules that ran
        self.any_ran = False
        self.precision = ""  # autocast's, if some module ran under it
        self._names: dict[int, str] = {}
        self._running = threading.local()
        self._attributes = attributes  # saves the state of models that are first seen during the run
        for prefix, model in zip(model_prefixes(models), models, strict=True):
            self._learn(model, prefix)

    def _learn(self, model: Module, prefix: str) -> None:
        self.roots.append(model)
        self._attributes.note([model])
        for name, module in named_modules(model).items():
            self._names.setdefault(id(module), ".".join(part for part in (prefix, name) if part))

    @property
    def _stack(self) -> list[Module]:
        return self._running.__dict__.setdefault("stack", [])  # type: ignore[no-any-return]

    def here(self) -> tuple[str, str]:
        """Return the path and class of the innermost running module; the path of a model itself is empty."""
        stack = self._stack
        return (self._names.get(id(stack[-1]), ""), type(stack[-1]).__name__) if stack else ("", "")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Track modules within the context, with global hooks."""

        def enters(module: Module, args: Any) -> None:
            self.any_ran = True
            self.precision = self.precision or current_autocast()
            if id(module) not in self._names and not self._stack:
                self._learn(module, "")
            self._stack.append(module)

        def leaves(module: Module, args: Any, result: Any) -> None:
            stack = self._stack
            while stack and stack.pop() is not module:  # a module that raised may still be on the stack
                pass

        hooks = register_module_forward_pre_hook(enters), register_module_forward_hook(leaves, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()


def current_autocast() -> str:
    """Return the precision of autocast on any device type: "fp16" or "bf16"; "" where it is off."""
    for kind in DEVICE_TYPES:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return "fp16" if dtype == torch.float16 else "bf16" if dtype == torch.bfloat16 else ""
    return ""


def model_prefixes(models: Sequence[Module]) -> list[str]:
    """Return the prefix for the module names of each model: its class or its index; "" for a single model."""
    classes = [type(model).__name__ for model in models]
    if len(models) == 1:
        return [""]
    return classes if len(set(classes)) == len(classes) else [str(number) for number in range(len(models))]

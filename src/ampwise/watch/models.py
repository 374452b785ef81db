"""The models of a script: which one an optimizer trains, what its parameters are called, and when it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampwise.watch.hook import Hook
from ampwise.watch.patches import Patches

__all__ = ["Models"]

MOST = 256  # models that are remembered
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of DDP, torch.compile, FSDP


class Models:
    """Found where they are asked for their parameters, which is what an optimizer is made from."""

    def __init__(self, patches: Patches, begins: Callable[..., None], ends: Callable[..., None]) -> None:
        self._asked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooked: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._begins, self._ends = Hook(begins), Hook(ends)
        for name in ("parameters", "named_parameters"):
            patches.replace(nn.Module, name, self._remembering)
        patches.replace(torch, "compile", self._hooking_compiled)
        for owner, name in ((torch, "save"), (torch.jit, "script"), (torch.jit, "trace"), (torch.onnx, "export")):
            patches.replace(owner, name, self._without_hooks)

    def of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """The models that have an optimizer's parameters: as few as have them all, the innermost of those alike."""
        left = {id(each) for group in optimizer.param_groups for each in group["params"]}
        parts = {model: {id(each) for each in nn.Module.parameters(model)} for model in list(self._asked)}
        sizes = {model: len(list(model.modules())) for model in parts}
        found: list[nn.Module] = []
        while left and parts:
            best = max(parts, key=lambda model: (len(left & parts[model]), -sizes[model]))
            if not left & parts[best]:
                break
            found.append(best)
            left -= parts.pop(best)
        return found

    def names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Of an optimizer's parameters, in its order; "group.index" for those that no model has."""
        models = self.of(optimizer)
        known: dict[int, str] = {}
        for model in models:
            prefix = f"{type(model).__name__}." if len(models) > 1 else ""
            known |= {id(each): prefix + _plain(name) for name, each in nn.Module.named_parameters(model)}
        return [
            known.get(id(each), f"{number}.{index}")
            for number, group in enumerate(optimizer.param_groups)
            for index, each in enumerate(group["params"])
        ]

    def remember(self, model: nn.Module) -> None:
        """One that may be an optimizer's."""
        self._asked.add(model)

    def watch(self, model: nn.Module) -> None:
        """Be told when it runs."""
        if model not in self._hooked:
            before = model.register_forward_pre_hook(self._begins)
            # Called even if the forward pass fails, or a run would seem to go on for ever.
            after = model.register_forward_hook(self._ends, always_call=True)
            self._hooked[model] = [before, after]

    def forget(self) -> None:
        """Take all hooks off."""
        for handles in list(self._hooked.values()):
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    def _remembering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and len(self._asked) < MOST:  # in this order: it may be traced
                self._asked.add(module)
            return original(module, *args, **kwargs)

        return asked

    def _hooking_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            if isinstance(compiled, nn.Module):  # outside of the graph, where hooks can be seen
                self.watch(compiled)
            return compiled

        return compile

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            models = list(self._hooked)
            self.forget()
            try:
                return original(*args, **kwargs)
            finally:
                for model in models:
                    self.watch(model)

        return call


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name

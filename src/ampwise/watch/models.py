"""The models of a script: which one an optimizer trains, what its parameters are called, and when it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ampwise.watch.hook import Hook
from ampwise.watch.patches import Patches

__all__ = ["UNTOUCHED", "Models", "names_of"]

MOST = 4096  # models that are remembered
TAKING_MODELS_APART = (
    (torch, "save"),
    (torch.jit, "script"),
    (torch.jit, "trace"),
    (torch.onnx, "export"),
    (torch.cuda, "make_graphed_callables"),
    (torch.cuda.graphs, "make_graphed_callables"),
)
# With a hook anywhere on them these take a slower way in evaluation, with other last bits.
UNTOUCHED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # of DDP, torch.compile, FSDP


class Models:
    """Found where they are asked for their parameters, which is what an optimizer is made from."""

    def __init__(
        self,
        patches: Patches,
        begins: Callable[..., None],
        ends: Callable[..., None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._asked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooked: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._begins, self._ends = Hook(begins, failed), Hook(ends, failed)
        for name in ("parameters", "named_parameters"):
            patches.replace(nn.Module, name, self._remembering)
        patches.replace(torch, "compile", self._hooking_compiled)
        for owner, name in TAKING_MODELS_APART:
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

    def remember(self, model: nn.Module) -> None:
        """One that may be an optimizer's."""
        self._asked.add(model)

    def watch(self, model: nn.Module) -> None:
        """Be told when it runs."""
        if model not in self._hooked and not isinstance(model, UNTOUCHED):
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
            with _bare(args):
                return original(*args, **kwargs)

        return call


@contextmanager
def _bare(things: Any) -> Iterator[None]:
    """Without our hooks on models among the things, or on copies of such; they come back under the same keys.

    Under new ones, torch.compile would take the model for another.
    """
    taken: list[tuple[Any, int, Any]] = []
    for module in {each for model in _models_in(things) for each in model.modules()}:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, Hook):
                    taken.append((hooks, key, hooks.pop(key)))
        called = module._forward_hooks_always_called
        taken += [(called, key, called.pop(key)) for key in list(called) if key not in module._forward_hooks]
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def _models_in(things: Any, depth: int = 3) -> Iterator[nn.Module]:
    if isinstance(things, nn.Module):
        yield things
    elif depth and isinstance(things, dict | list | tuple):
        for each in list(things.values() if isinstance(things, dict) else things)[:MOST]:
            yield from _models_in(each, depth - 1)


def names_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Of an optimizer's parameters, in its order; "group.index" for those that none of the models has."""
    known: dict[int, str] = {}
    for model in models:
        prefix = f"{type(model).__name__}." if len(models) > 1 else ""
        known |= {id(each): prefix + _plain(name) for name, each in nn.Module.named_parameters(model)}
    return [
        known.get(id(each), f"{number}.{index}")
        for number, group in enumerate(optimizer.param_groups)
        for index, each in enumerate(group["params"])
    ]


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name

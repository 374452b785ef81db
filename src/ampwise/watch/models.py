"""The models of a script: which one an optimizer trains, what its parameters are called, and when it runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.watch.asking import inner_model
from ampwise.watch.hook import Hook, PacedHook
from ampwise.watch.patches import Patches
from ampwise.watch.rest import Rest

__all__ = ["OTHER_WITH_HOOKS", "UNTOUCHED", "Models", "bare", "calling_here", "names_of", "plain_name", "within"]

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
OTHER_WITH_HOOKS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
UNTOUCHED = (*OTHER_WITH_HOOKS, torch.jit.ScriptModule)  # the last takes none
# Of DDP, torch.compile, FSDP1 and activation checkpointing.
WRAPPING = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


class Models:
    """Found where they are asked for their parameters, which is what an optimizer is made from."""

    def __init__(
        self,
        patches: Patches,
        begins: Callable[..., None],
        ends: Callable[..., None],
        failed: Callable[[Exception], None],
        rest: Rest,
        at_rest: tuple[Callable[..., None], Callable[..., None]],  # instead of the two, in steps that are passed over
        compiles: Callable[[], None] = lambda: None,
    ) -> None:
        # By identity: a module may have any notion of what it is equal to.
        self._asked: dict[int, weakref.ref[nn.Module]] = {}
        self._hooked: MutableMapping[nn.Module, list[Any]] = WeakIdKeyDictionary()
        self._compiled: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()
        self.has_compiled_functions = False  # which may run any module
        self._begins = PacedHook(begins, failed, rest, at_rest[0])
        self._ends = PacedHook(ends, failed, rest, at_rest[1])
        self._compiles, self._failed = compiles, failed  # the first is told before something is compiled
        for name in ("parameters", "named_parameters"):
            patches.replace(nn.Module, name, self._remembering)
        patches.replace(torch, "compile", self._hooking_compiled)
        for owner, name in TAKING_MODELS_APART:
            patches.replace(owner, name, self._without_hooks)

    def of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """The models that have an optimizer's parameters: as few as have them all, the innermost of those alike."""
        left = {id(each) for group in optimizer.param_groups for each in group["params"]}
        parts = [
            (model, own, len(list(model.modules())))
            for model in self._living()
            if left & (own := {id(each) for each in nn.Module.parameters(model)})
        ]
        found: list[nn.Module] = []
        while left and parts:
            best = max(range(len(parts)), key=lambda at: (len(left & parts[at][1]), -parts[at][2]))
            model, own, _ = parts.pop(best)
            if not left & own:
                break
            found.append(model)
            left -= own
        return found

    def around(self, model: nn.Module) -> nn.Module:
        """The outermost that it is known to be a part of, but for wrappers: a call of that is the whole pass."""
        holding = [inner_model(each) for each in self._living() if _holds(inner_model(each), model)]
        return max(holding, key=lambda each: len(list(each.modules())), default=model)

    def remember(self, model: nn.Module) -> None:
        """One that may be an optimizer's, and was made before."""
        self._asked[id(model)] = weakref.ref(model)
        if self.is_compiled(model):
            self._note_parts(model)

    def remember_function(self, function: FunctionType) -> None:
        self.has_compiled_functions |= hasattr(function, "_torchdynamo_orig_callable")

    def watch(self, model: nn.Module) -> None:
        """Be told when it runs."""
        if model not in self._hooked and not isinstance(model, UNTOUCHED):
            before = model.register_forward_pre_hook(self._begins, with_kwargs=True)
            # Called even if the forward pass fails, or a run would seem to go on for ever.
            after = model.register_forward_hook(self._ends, always_call=True)
            self._hooked[model] = [before, after]

    @property
    def has_compiled(self) -> bool:
        return len(self._compiled) > 0

    def is_compiled(self, module: nn.Module) -> bool:
        """Whether torch.compile has it, by itself or as a part of another."""
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        return in_place or "_orig_mod" in module._modules or module in self._compiled

    def forget(self) -> None:
        """Take all hooks off."""
        for handles in list(self._hooked.values()):
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    def _remembering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def asked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                known = self._asked.get(id(module))
                if known is None or known() is not module:
                    self._note(module)
            return original(module, *args, **kwargs)

        return asked

    def _note(self, module: nn.Module) -> None:
        if len(self._asked) >= MOST:
            self._asked = {key: known for key, known in self._asked.items() if known() is not None}
        if len(self._asked) < MOST:
            self._asked[id(module)] = weakref.ref(module)

    def _living(self) -> list[nn.Module]:
        """Those that were asked for their parameters, and are still there."""
        return [model for known in list(self._asked.values()) if (model := known()) is not None]

    def _hooking_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            try:
                self._note_compiled(args[0] if args else kwargs.get("model"))
                self._compiles()
            except Exception as error:  # ours, which the script must not learn of
                self._failed(error)
            compiled = original(*args, **kwargs)
            if isinstance(compiled, nn.Module):  # outside of the graph, where hooks can be seen
                self.watch(compiled)
            return compiled

        return compile

    def _note_compiled(self, thing: Any) -> None:
        owner = getattr(thing, "__self__", None) if getattr(thing, "__name__", "") == "_call_impl" else thing
        if isinstance(owner, nn.Module):  # itself, or by its own ``compile``
            self._note_parts(owner)
        elif thing is not None:  # else it is made a decorator, which comes back with what it decorates
            self.has_compiled_functions = True

    def _note_parts(self, model: nn.Module) -> None:
        for module in model.modules():
            self._compiled[module] = None

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with bare(args):
                return original(*args, **kwargs)

        return call


@contextmanager
def bare(things: Any) -> Iterator[None]:
    """Without our hooks on models among the things, or on copies of such; they come back under the same keys.

    Under new ones, torch.compile would take the model for another.
    """
    taken: list[tuple[Any, int, Any]] = []
    for module in {id(each): each for model in _models_in(things) for each in model.modules()}.values():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, Hook):
                    taken.append((hooks, key, hooks.pop(key)))
        for hooks, marks in (
            (module._forward_hooks, module._forward_hooks_always_called),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            taken += [(marks, key, marks.pop(key)) for key in list(marks) if key not in hooks]
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def _holds(whole: nn.Module, part: nn.Module) -> bool:
    return any(each is part for each in whole.modules())


def calling_here() -> nn.Module | None:
    """The outermost module that is being called, but for wrappers, as the frames tell."""
    found: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and type(module).__name__ not in WRAPPING:
                found = module
        frame = frame.f_back
    return found


def _models_in(things: Any, depth: int = 3) -> Iterator[nn.Module]:
    if isinstance(things, nn.Module):
        yield things
    elif depth and isinstance(things, dict | list | tuple):
        for each in list(things.values() if isinstance(things, dict) else things)[:MOST]:
            yield from _models_in(each, depth - 1)


def within(model: nn.Module, is_closed: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by name, but for those that are closed and all that they are made of."""
    closed: tuple[str, ...] = ()
    for name, module in model.named_modules():  # each comes before its parts
        path = f"{name}." if name else ""
        if path.startswith(closed):
            continue
        if is_closed(module):
            closed = (*closed, path)
        else:
            yield name, module


def names_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Of an optimizer's parameters, in its order; "group.index" for those that none of the models has."""
    known: dict[int, str] = {}
    for model in models:
        prefix = f"{type(model).__name__}." if len(models) > 1 else ""
        known |= {id(each): prefix + plain_name(name) for name, each in nn.Module.named_parameters(model)}
    return [
        known.get(id(each), f"{number}.{index}")
        for number, group in enumerate(optimizer.param_groups)
        for index, each in enumerate(group["params"])
    ]


def plain_name(name: str) -> str:
    """Without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

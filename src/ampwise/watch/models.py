"""The models of a script: which ones an optimizer trains, the names of their parameters, and when they run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.watch.hooks import ForwardEnds, ForwardStarts, Hook
from ampwise.watch.inspection import ids_of_contents, inner_model
from ampwise.watch.patches import Patches
from ampwise.watch.step_skipper import StepSkipper

__all__ = [
    "CHANGED_BY_HOOKS",
    "NEVER_HOOKED",
    "Models",
    "modules_without",
    "name_without_wrappers",
    "names_of",
    "outermost_running_module",
    "without_hooks",
]

MOST = 4096  # models to remember
TAKING_MODELS_APART = (
    (torch, "save"),
    (torch.jit, "script"),
    (torch.jit, "trace"),
    (torch.onnx, "export"),
    (torch.cuda, "make_graphed_callables"),
    (torch.cuda.graphs, "make_graphed_callables"),
)
# With a hook on them or their parts, these leave their fast path in evaluation, which changes the last bits.
CHANGED_BY_HOOKS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
NEVER_HOOKED = (*CHANGED_BY_HOOKS, torch.jit.ScriptModule)  # ScriptModule does not take them
# Wrappers, and names that wrappers add to those of parameters.
WRAPPING = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


class _Found(NamedTuple):
    """Result of the last search for an optimizer's models."""

    parameters: set[int]  # ids of the optimizer's parameters
    models: list[weakref.ref[nn.Module]]
    sharing: list[weakref.ref[nn.Module]]  # all models with some of the parameters


class Models:
    """Models, found through calls of their ``parameters()``, which optimizers are made from."""

    def __init__(
        self,
        patches: Patches,
        begins: Callable[..., None],
        ends: Callable[..., None],
        failed: Callable[[Exception], None],
        skipper: StepSkipper,
        compiles: Callable[[], None] = lambda: None,
    ) -> None:
        # By identity: a module may define __eq__.
        self._remembered: dict[int, weakref.ref[nn.Module]] = {}
        self._found: _Found | None = None  # by ``of``, in the current step
        self._hooked: MutableMapping[nn.Module, list[Any]] = WeakIdKeyDictionary()
        self._compiled: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()
        self.has_compiled_functions = False  # these may run any module
        self._begins = ForwardStarts(begins, failed, skipper)
        self._ends = ForwardEnds(ends, failed, skipper)
        self._compiles, self._failed = compiles, failed  # the first is called before something is compiled
        for name in ("parameters", "named_parameters"):
            patches.replace(nn.Module, name, self._noting_parameters_call)
        patches.replace(torch, "compile", self._noting_compile)
        for owner, name in TAKING_MODELS_APART:
            patches.replace(owner, name, self._without_hooks)

    def of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the models of an optimizer's parameters: as few as possible, and innermost ones first."""
        left = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if self._found is not None and self._found.parameters == left:
            return _alive(self._found.models)
        parameters = left.copy()
        every = ((model, *ids_of_contents(model)) for model in self._living())
        parts = [(model, own, len(modules)) for model, own, modules in every if not left.isdisjoint(own)]
        every_part = parts.copy()
        found: list[nn.Module] = []
        while left and parts:
            best = max(range(len(parts)), key=lambda at: (len(left & parts[at][1]), -parts[at][2]))
            model, own, _ = parts.pop(best)
            if not left & own:
                break
            found.append(model)
            left -= own
        refer = weakref.ref[nn.Module]
        self._found = _Found(parameters, [refer(each) for each in found], [refer(each[0]) for each in every_part])
        return found

    def forget_found(self) -> None:
        """Forget the result of ``of``, which is reused within a step only."""
        self._found = None

    def around(self, model: nn.Module) -> nn.Module:
        """Return the outermost known model that contains this one, without wrappers: its call is the whole pass."""
        found, most = model, 0
        # A model that contains it has its parameters, too: after ``of`` has found it, only these need to be searched.
        last = self._found
        is_found = last is not None and any(refer() is model for refer in last.models)
        for each in map(inner_model, _alive(last.sharing) if last is not None and is_found else self._living()):
            modules = ids_of_contents(each)[1]
            if len(modules) > most and id(model) in modules:
                found, most = each, len(modules)
        return found

    def remember(self, model: nn.Module) -> None:
        """Add a model that was made before the watch."""
        self._remembered[id(model)] = weakref.ref(model)
        self._found = None
        if self.is_compiled(model):
            self._note_parts(model)

    def remember_function(self, function: FunctionType) -> None:
        self.has_compiled_functions |= hasattr(function, "_torchdynamo_orig_callable")

    def watch(self, model: nn.Module) -> None:
        """Put hooks on a model, to notice when it runs."""
        if model not in self._hooked and not isinstance(model, NEVER_HOOKED):
            before = model.register_forward_pre_hook(self._begins, with_kwargs=True)
            # Called even if the forward pass fails, or the pass would count as still running.
            after = model.register_forward_hook(self._ends, always_call=True)
            self._hooked[model] = [before, after]

    @property
    def has_compiled(self) -> bool:
        return len(self._compiled) > 0

    def is_compiled(self, module: nn.Module) -> bool:
        """Whether the module is compiled, by itself or as a part of another."""
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        return in_place or "_orig_mod" in module._modules or module in self._compiled

    def forget(self) -> None:
        """Remove all hooks."""
        for handles in list(self._hooked.values()):
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    def _noting_parameters_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def parameters_called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                known = self._remembered.get(id(module))
                if known is None or known() is not module:
                    self._note(module)
            return original(module, *args, **kwargs)

        return parameters_called

    def _note(self, module: nn.Module) -> None:
        self._found = None
        if len(self._remembered) >= MOST:
            self._remembered = {key: known for key, known in self._remembered.items() if known() is not None}
        if len(self._remembered) < MOST:
            self._remembered[id(module)] = weakref.ref(module)

    def _living(self) -> list[nn.Module]:
        """Return the remembered models that are alive."""
        return _alive(list(self._remembered.values()))

    def _noting_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            try:
                self._note_compiled(args[0] if args else kwargs.get("model"))
                self._compiles()
            except Exception as error:  # must not reach the script
                self._failed(error)
            compiled = original(*args, **kwargs)
            if isinstance(compiled, nn.Module):  # its hooks are outside of the graph
                self.watch(compiled)
            return compiled

        return compile

    def _note_compiled(self, thing: Any) -> None:
        owner = getattr(thing, "__self__", None) if getattr(thing, "__name__", "") == "_call_impl" else thing
        if isinstance(owner, nn.Module):  # the module, or its ``compile`` method
            self._note_parts(owner)
        elif thing is not None:  # None: torch.compile returns a decorator, which calls it again
            self.has_compiled_functions = True

    def _note_parts(self, model: nn.Module) -> None:
        for module in model.modules():
            self._compiled[module] = None

    def _without_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with without_hooks(args):
                return original(*args, **kwargs)

        return call


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [model for refer in references if (model := refer()) is not None]


@contextmanager
def without_hooks(things: Any) -> Iterator[None]:
    """Remove ampwise's hooks from the models among ``things``, and put them back under the same keys.

    With new keys, torch.compile would recompile the model.
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


def outermost_running_module() -> nn.Module | None:
    """Return the outermost module on the call stack, without wrappers."""
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


def modules_without(model: nn.Module, is_excluded: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, without those for which ``is_excluded`` is true and their parts."""
    excluded: tuple[str, ...] = ()
    for name, module in model.named_modules():  # a module comes before its parts
        path = f"{name}." if name else ""
        if path.startswith(excluded):
            continue
        if is_excluded(module):
            excluded = (*excluded, path)
        else:
            yield name, module


def names_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[str]:
    """Return names of an optimizer's parameters, in its order; "group.index" if no model has the parameter."""
    known: dict[int, str] = {}
    for model in models:
        prefix = f"{type(model).__name__}." if len(models) > 1 else ""
        known |= {id(each): prefix + name_without_wrappers(name) for name, each in nn.Module.named_parameters(model)}
    return [
        known.get(id(each), f"{number}.{index}")
        for number, group in enumerate(optimizer.param_groups)
        for index, each in enumerate(group["params"])
    ]


def name_without_wrappers(name: str) -> str:
    """Remove the parts of a parameter's name that wrappers have added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

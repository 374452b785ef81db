"""The models of a script: which ones an optimizer trains, the names of their parameters, and hooks on them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import wraps
from threading import get_ident
from types import FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.watch.inspection import ids_of_contents, inner_model
from ampwise.watch.loss_code import running_code
from ampwise.watch.model_calls import AutocastState
from ampwise.watch.overhead import StepSkipper
from ampwise.watch.patches import Patches

if TYPE_CHECKING:
    from ampwise.watch.step_watch import StepWatch

__all__ = [
    "CHANGED_BY_HOOKS",
    "NEVER_HOOKED",
    "Hook",
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


# Hooks


class Hook:
    """Hook that calls ``on_call``. Copies of a model share it; a pickled model has a harmless function instead.

    It does nothing while torch.compile traces, or graphs would break. The time it takes is added to ``skipper.spent``.
    """

    __name__ = "ampwise_hook"

    def __init__(self, on_call: Callable[..., None], failed: Callable[[Exception], None], skipper: StepSkipper) -> None:
        self._on_call, self._failed, self._skipper = on_call, failed, skipper

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        skipper = self._skipper
        try:
            began = skipper.clock()
            self._on_call(*args)
            skipper.spent += skipper.clock() - began
        except Exception as error:  # must not reach the script
            self._failed(error)

    def __deepcopy__(self, memo: object) -> Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes any arguments and does nothing: loading needs no ampwise.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardStarts(Hook):
    """Hook before a model's forward pass. In skipped steps it keeps what a replay of the last training call needs.

    All in one function, as it runs at every step. It reads ``skipper.on`` first: a script that compiles skips no steps.
    """

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        skipper = self._skipper
        if not skipper.on:
            return super().__call__(model, args, kwargs)
        try:
            if not torch.is_grad_enabled():
                if skipper.follows_evaluation():
                    self._on_call(model, args, kwargs)
            elif skipper.running is None and get_ident() == skipper.thread:
                skipper.running = model
                autocast = AutocastState.here("cpu") if torch.is_autocast_enabled("cpu") else None
                random, running = torch.default_generator.get_state(), running_code()
                skipper.last_call = (model, args, kwargs, autocast, random, running)
        except Exception as error:
            self._failed(error)


class ForwardEnds(Hook):
    """Hook after a model's forward pass."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._skipper.running is model:
            self._skipper.running = None
        else:
            super().__call__(model, args, output)


@contextlib.contextmanager
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


def _models_in(things: Any, depth: int = 3) -> Iterator[nn.Module]:
    if isinstance(things, nn.Module):
        yield things
    elif depth and isinstance(things, dict | list | tuple):
        for each in list(things.values() if isinstance(things, dict) else things)[:MOST]:
            yield from _models_in(each, depth - 1)


# Models


class _Found(NamedTuple):
    """Result of the last search for an optimizer's models."""

    parameters: set[int]  # ids of the optimizer's parameters
    models: list[weakref.ref[nn.Module]]
    sharing: list[weakref.ref[nn.Module]]  # all models with some of the parameters


class Models:
    """Models, found through calls of their ``parameters()``, which optimizers are made from."""

    def __init__(self, patches: Patches, watch: StepWatch, skipper: StepSkipper) -> None:
        # By identity: a module may define __eq__.
        self._remembered: dict[int, weakref.ref[nn.Module]] = {}
        self._found: _Found | None = None  # by ``of``, in the current step
        self._hooked: MutableMapping[nn.Module, list[Any]] = WeakIdKeyDictionary()
        self._compiled: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()
        self.has_compiled_functions = False  # these may run any module
        self._watch = watch
        self.followed_step: Callable[[Any, Any], Any] | None = None  # wraps an optimizer's compiled step
        self._begins = ForwardStarts(watch.model_begins, watch.failed, skipper)
        self._ends = ForwardEnds(watch.model_ends, watch.failed, skipper)
        for name in ("parameters", "named_parameters"):
            patches.replace(nn.Module, name, self._noting_parameters_call)
        patches.wrap(nn.Module, "state_dict", self._state_asked)
        patches.wrap(torch, "compile", self.compile)
        for owner, name in TAKING_MODELS_APART:
            patches.wrap(owner, name, _call_without_hooks)

    def of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the models of an optimizer's parameters: as few as possible, and innermost ones first."""
        left = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if self._found is not None and self._found.parameters == left:
            return _alive(self._found.models)
        parameters = left.copy()
        every = ((model, *ids_of_contents(model)) for model in _alive(self._remembered.values()))
        parts = [(model, own, len(modules)) for model, own, modules in every if not left.isdisjoint(own)]
        sharing = [weakref.ref(model) for model, _, _ in parts]
        found: list[nn.Module] = []
        while left and parts:
            best = max(range(len(parts)), key=lambda at: (len(left & parts[at][1]), -parts[at][2]))
            model, own, _ = parts.pop(best)
            if not left & own:
                break
            found.append(model)
            left -= own
        self._found = _Found(parameters, [weakref.ref(model) for model in found], sharing)
        return found

    def forget_found(self) -> None:
        """Forget the result of ``of``, which is reused within a step only."""
        self._found = None

    def around(self, model: nn.Module) -> nn.Module:
        """Return the outermost known model that contains this one, without wrappers: its call is the whole pass."""
        # A model that contains it has its parameters, too: after ``of`` has found it, only these need to be searched.
        last, searched = self._found, self._remembered.values()
        if last is not None and any(refer() is model for refer in last.models):
            searched = last.sharing  # type: ignore[assignment]
        found, most = model, 0
        for each in map(inner_model, _alive(searched)):
            modules = ids_of_contents(each)[1]
            if len(modules) > most and id(model) in modules:
                found, most = each, len(modules)
        return found

    def remember(self, thing: nn.Module | FunctionType) -> None:
        """Add a model or a function that was made before the watch."""
        if isinstance(thing, FunctionType):
            self.has_compiled_functions |= hasattr(thing, "_torchdynamo_orig_callable")
            return
        self._remembered[id(thing)] = weakref.ref(thing)
        self._found = None
        if self.is_compiled(thing):
            self._note_compiled(thing)

    def watch(self, model: nn.Module) -> None:
        """Put hooks on a model, to notice when it runs."""
        if model not in self._hooked and not isinstance(model, NEVER_HOOKED):
            before = model.register_forward_pre_hook(self._begins, with_kwargs=True)
            # Called even if the forward pass fails, or the pass would count as still running.
            after = model.register_forward_hook(self._ends, always_call=True)
            self._hooked[model] = [before, after]

    @property
    def has_compiled(self) -> bool:
        """Whether something of the script is compiled."""
        return self.has_compiled_functions or len(self._compiled) > 0

    def is_compiled(self, module: nn.Module) -> bool:
        """Whether the module is compiled, by itself or as a part of another."""
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        return in_place or "_orig_mod" in module._modules or module in self._compiled

    def _note_compiled(self, model: nn.Module) -> None:
        for module in model.modules():
            self._compiled[module] = None

    def forget(self) -> None:
        """Remove all hooks."""
        for handle in [each for handles in self._hooked.values() for each in handles]:
            handle.remove()
        self._hooked.clear()

    # Wrappers

    def _noting_parameters_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def parameters_called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # first, so that torch.compile traces nothing of ours
                self._watch.frozen.parameters_asked(module, sys._getframe(1))
                known = self._remembered.get(id(module))
                if known is None or known() is not module:
                    self._found = None
                    if len(self._remembered) >= MOST:
                        self._remembered = {key: each for key, each in self._remembered.items() if each() is not None}
                    if len(self._remembered) < MOST:
                        self._remembered[id(module)] = weakref.ref(module)
            return original(module, *args, **kwargs)

        return parameters_called

    def _state_asked(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._watch.frozen.parameters_asked(module, sys._getframe(2))
        state = original(module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            try:
                self._watch.saved_states.made(module, state, sys._getframe(2))
            except Exception as error:  # must not reach the script
                self._watch.failed(error)
        return state

    def compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thing = args[0] if args else kwargs.get("model")
        in_place: nn.Module | None = None
        try:
            if getattr(thing, "__name__", "") == "_call_impl":  # by a module's ``compile`` method
                thing = in_place = getattr(thing, "__self__", None)
            if isinstance(thing, nn.Module):
                self._note_compiled(thing)
            elif thing is not None:  # None: torch.compile returns a decorator, which calls it again
                self.has_compiled_functions = True
            self._watch.before_compile()
        except Exception as error:  # must not reach the script
            self._watch.failed(error)
        compiled = original(*args, **kwargs)
        if isinstance(compiled, nn.Module):  # its hooks are outside of the graph
            self.watch(compiled)
        elif in_place is not None:
            return self._followed(in_place, compiled)
        elif self.followed_step and isinstance(thing, MethodType) and isinstance(thing.__self__, torch.optim.Optimizer):
            return self.followed_step(thing.__self__, compiled)
        return compiled

    def _followed(self, model: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model's compiled call with the hooks around it, as those inside do nothing in compiled code."""
        refer = weakref.ref(model)  # the model keeps its compiled call

        @wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            model, output = refer(), None
            if torch.compiler.is_compiling() or model is None or model not in self._hooked:
                return compiled(*args, **kwargs)
            self._begins(model, args, kwargs)
            try:
                output = compiled(*args, **kwargs)
            finally:
                self._ends(model, args, output)
            return output

        return call


def _call_without_hooks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with without_hooks(args):
        return original(*args, **kwargs)


def _alive(references: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [model for refer in list(references) if (model := refer()) is not None]


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

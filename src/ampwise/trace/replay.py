"""A step that can be run again, and the running of it: as it was, without leaving a mark."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.compiled import as_written
from ampwise.engine.precision.policy import named_modules
from ampwise.engine.precision.precision import precision_named
from ampwise.engine.precision.region import forward_in
from ampwise.randomness import captured, restore_random
from ampwise.trace.kept import Attributes, silent
from ampwise.trace.paths import Paths, prefixes
from ampwise.trace.ranges import Ranges, local, readable
from ampwise.trace.recorder import Leaf, Recorder, Undoing
from ampwise.trace.tape import Tape

__all__ = [
    "Ended",
    "Replay",
    "Settings",
    "Subject",
    "Taped",
    "in_precision",
    "is_compiled",
    "is_finite",
    "tensors_of",
    "uncollected",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run it."""

    backward: bool = True
    only_if_finite: bool = False  # no backward pass from a loss that is bad already
    scale: float = 1.0  # of the loss, in the backward pass
    precision: str | None = None  # instead of the one it ran in
    keep: str | None = None  # a module, or a glob of modules, to run in FP32

    def goes_back_from(self, loss: Tensor) -> bool:
        """Whether there is to be a backward pass."""
        if not (self.backward and self.only_if_finite):
            return self.backward
        with _disable_current_modes():  # or the question would be on the tape
            return is_finite(loss)


@dataclass(slots=True, kw_only=True)
class Subject:
    """What is to be run again."""

    run: Callable[[Settings], Any]  # forward and, if wanted, backward; returns the loss, or what there is instead
    device: torch.device
    models: Sequence[Module] = ()
    batch: Mapping[str, Tensor] = field(default_factory=dict)  # what it is given, by name
    precision: str = "fp32"  # "": that of autocast, where some module runs under it
    scale: float = 1.0  # of the loss, when it failed
    random: Mapping[str, Any] | None = None  # the state of random numbers at its beginning; None: as it is now
    loss: float | None = None  # as it was
    ran: bool = True  # before: what it prints has been printed
    step: int | None = None
    optimizers: Sequence[Optimizer] = ()
    others: Sequence[Module] = ()  # models that ran, and are not among those: a teacher
    remarks: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None  # the script's, whose variables are to stay as they are

    def parameters(self) -> dict[str, Tensor]:
        return self._named("named_parameters", self.models)

    def buffers(self) -> dict[str, Tensor]:
        return self._named("named_buffers", self.models)

    def of_others(self, which: str) -> dict[str, Tensor]:
        named = [(type(model).__name__, pair) for model in self.others for pair in getattr(model, which)()]
        return {f"{owner}.{name}": tensor for owner, (name, tensor) in named}

    def evaluating(self) -> list[str]:
        """The modules in evaluation mode."""
        modules = [
            (".".join(part for part in (prefix, path) if part), module)
            for prefix, model in zip(prefixes(self.models), self.models, strict=True)
            for path, module in named_modules(model).items()
        ]
        return [name for name, module in modules if not module.training]

    def _named(self, which: str, models: Sequence[Module]) -> dict[str, Tensor]:
        """By the names they have where nothing is wrapped."""
        found: dict[str, Tensor] = {}
        for prefix, model in zip(prefixes(models), models, strict=True):
            for path, module in named_modules(model).items():
                for name, tensor in getattr(module, which)(recurse=False):
                    found.setdefault(".".join(part for part in (prefix, path, name) if part), tensor)
        return found


class Ended(NamedTuple):
    """How a run went."""

    loss: float | None
    bad: tuple[str, ...]  # parameters whose gradients are not finite
    gradients: int

    @property
    def finite(self) -> bool:
        return (self.loss is None or math.isfinite(self.loss)) and not self.bad


class Replay:
    """A subject, from ``with`` to its end: random numbers, gradients and all memory are then as they were."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._parameters = subject.parameters()
        self._attributes = Attributes()  # of the models, and what the function can reach
        self._stack = ExitStack()

    def __enter__(self) -> Replay:
        now = captured(self.subject.device)
        self._start = {**now, **(self.subject.random or {})}
        self._stack.callback(restore_random, now, self.subject.device)
        elsewhere = {each.device for each in self._parameters.values()} - {self.subject.device}
        for device in elsewhere:  # parts of a model on other devices draw from generators of theirs
            self._stack.callback(restore_random, captured(device, host=False), device)
        self._stack.enter_context(uncollected())
        self._attributes.note([*self.subject.models, self.subject.function])
        self._stack.enter_context(self._attributes.with_optimizers())
        gradients = [(each, each.grad) for each in self._parameters.values()]
        self._stack.callback(_put_back, gradients)
        self._stack.enter_context(as_written())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def plain(
        self, settings: Settings, change: AbstractContextManager[Any] | None = None, mode: Undoing | None = None
    ) -> Ended:
        """Run it, and say how it ended."""
        mode = mode or Undoing()
        try:
            with self._set(settings), change or nullcontext(), mode:
                result = self.subject.run(settings)
            return self._ended(result)
        finally:
            self._put_back(mode)

    def taped(self, settings: Settings) -> Taped:
        """Run it, with each operation written down."""
        paths = Paths(self.subject.models, self._attributes)
        recorder = Recorder(paths)
        try:
            with self._set(settings), paths.watched(), recorder:
                result = self.subject.run(settings)
            with torch.no_grad():
                return self._taped(recorder, paths, result)
        finally:
            self._put_back(recorder)

    def _adopt(self, models: Sequence[Module], leaves: Mapping[int, Leaf]) -> None:
        """Models that are known only now. Their gradients were what the recorder found."""
        self.subject.models = models
        self._parameters = self.subject.parameters()
        had = {id(leaf.tensor): leaf.gradient for leaf in leaves.values()}
        gradients = [(each, had.get(id(each), each.grad)) for each in self._parameters.values()]
        self._stack.callback(_put_back, gradients)

    def _put_back(self, mode: Undoing) -> None:
        mode.put_back()
        self._attributes.put_back()
        self._drop_gradients()

    def _taped(self, recorder: Recorder, paths: Paths, result: Any) -> Taped:
        tape = recorder.tape
        tape.has_modules = paths.any_ran
        if not self.subject.models:
            self._adopt(paths.roots, recorder.leaves)
        given = set(map(id, self.subject.models))
        self.subject.others = [each for each in paths.roots if id(each) not in given]
        self.subject.precision = self.subject.precision or paths.precision or "fp32"
        known = {id(each): name for name, each in self._parameters.items()}
        gradients = {}
        for number, (leaf, _) in enumerate(list(recorder.leaves.values())):
            if leaf.grad is not None:
                gradients[known.get(id(leaf), f"tensor {number + 1}")] = recorder.given(leaf.grad)
        for name, each in self._parameters.items():
            if each.grad is not None and name not in gradients:
                gradients[name] = recorder.given(each.grad)
        results = [recorder.given(tensor) for tensor in tensors_of(result)]
        tape.ranges.settle()
        bad = tuple(name for name, given in gradients.items() if tape.ranges.is_bad(given.slot))
        loss = None if not results else tape.ranges[results[0].slot][0]
        return Taped(tape, Ended(loss, bad, len(gradients)), results, gradients)

    @contextmanager
    def _set(self, settings: Settings) -> Iterator[None]:
        restore_random(self._start, self.subject.device)
        torch.clear_autocast_cache()  # or weights that are cast already would not be cast again
        self._drop_gradients()
        heard = silent() if self.subject.ran else nullcontext()
        with _kept(self.subject.models, settings.keep), in_precision(settings.precision, self.subject.device), heard:
            yield
        self.subject.ran = True

    def _drop_gradients(self) -> None:
        for each in self._parameters.values():
            each.grad = None

    def _ended(self, result: Any) -> Ended:
        found = next(iter(tensors_of(result)), None)
        loss = None if found is None else _number(found)
        ranges = Ranges()
        slots = {name: ranges.add(each.grad) for name, each in self._parameters.items() if each.grad is not None}
        ranges.settle()
        return Ended(loss, tuple(name for name, slot in slots.items() if ranges.is_bad(slot)), len(slots))


class Taped(NamedTuple):
    """A run that was written down."""

    tape: Tape
    ended: Ended
    results: list[Any]  # what the function returned, as given
    gradients: dict[str, Any]


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Those that a function has returned, the loss first."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        first = [result["loss"]] if "loss" in result else []
        for each in (*first, *(value for key, value in result.items() if key != "loss")):
            yield from tensors_of(each)
    elif isinstance(result, list | tuple):
        for each in result:
            yield from tensors_of(each)
    elif isinstance(getattr(result, "loss", None), Tensor):
        yield result.loss


def _number(tensor: Tensor) -> float:
    """The loss; of something larger, whatever shows that it is not finite."""
    values = readable(tensor)
    return 0.0 if values is None else float(values.abs().max() if values.numel() > 1 else values.reshape(()))


def is_finite(tensor: Tensor) -> bool:
    """What this rank has of it; true of what cannot be looked at."""
    values = readable(local(tensor))
    return values is None or bool(values.isfinite().all())


def is_compiled(thing: Any) -> bool:
    """A model with something in it that torch.compile has compiled, or such a function."""
    if isinstance(thing, Module):
        return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in thing.modules())
    return hasattr(thing, "_torchdynamo_orig_callable")


def _put_back(gradients: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextmanager
def uncollected() -> Iterator[None]:
    """While inside, garbage is not collected.

    Thousands of objects come and go, and to collect garbage among all that a program has takes as long as a step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _kept(models: Sequence[Module], path: str | None) -> Iterator[None]:
    """A module in FP32."""
    named = [pair for model in models for pair in named_modules(model).items() if path]
    found = list(dict.fromkeys(module for name, module in named if fnmatchcase(name, path or "")))
    found = [module for module in found if type(module).forward is not Module.forward]
    before = [(module, module.__dict__.get("forward")) for module in found]
    for module in found:
        module.forward = forward_in("fp32", module)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


@contextmanager
def in_precision(name: str | None, device: torch.device) -> Iterator[None]:
    """Wherever autocast is turned on, it is this precision's."""
    if name is None:
        yield
        return
    dtype = precision_named(name).dtype
    enter: Callable[[Any], Any] = autocast.__enter__

    def entered(self: Any) -> Any:
        # It may be the script's own, which is entered again at each step: a decorator's, or an attribute.
        before = self._enabled, self.fast_dtype
        self._enabled, self.fast_dtype = self._enabled and dtype is not None, dtype or self.fast_dtype
        try:
            return enter(self)
        finally:
            self._enabled, self.fast_dtype = before

    autocast.__enter__ = entered  # type: ignore[method-assign]
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=torch.is_autocast_enabled(device.type)):
            yield
    finally:
        autocast.__enter__ = enter  # type: ignore[method-assign]

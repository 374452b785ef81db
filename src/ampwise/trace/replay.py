"""Replay a step from the same state, and restore everything afterwards."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from ampwise.finding.call_site import CallSite
from ampwise.numbers.emulation.eager_mode import run_eagerly
from ampwise.trace.module_paths import ModulePaths, model_prefixes
from ampwise.trace.python_state import PythonState, muted_output
from ampwise.trace.recorder import OpRecorder, Tape, TensorRead, UndoMode, overwrite
from ampwise.trace.value_ranges import ValueRanges, local_shard, readable_values
from ampwise.train.precision.call_in_precision import wrap_forward
from ampwise.train.precision.policy import named_modules
from ampwise.train.precision.precision import precision_named
from ampwise.train.random_state import capture_random, restore_random

__all__ = [
    "OptimizerPast",
    "RecordedReplay",
    "Replay",
    "ReplayResult",
    "ReplaySettings",
    "ReplayStep",
    "autocast_forced_to",
    "gc_disabled",
    "is_compiled",
    "is_finite",
    "tensors_of",
]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to run a replay."""

    backward: bool = True
    only_if_finite: bool = False  # no backward pass from a loss that is not finite
    scale: float = 1.0  # loss scale in the backward pass
    precision: str | None = None  # instead of the original one
    keep: str | None = None  # a module, or a glob of modules, to run in FP32

    def goes_back_from(self, loss: Tensor) -> bool:
        """Return whether to run the backward pass from this loss."""
        if not (self.backward and self.only_if_finite):
            return self.backward
        with _disable_current_modes():  # or this check would be recorded on the tape
            return is_finite(loss)


class OptimizerPast(NamedTuple):
    """Facts about an optimizer from before the step."""

    made_at: CallSite = CallSite()
    lr_set_at: CallSite = CallSite()  # the scheduler's place, or that of an assignment, if the rate has changed
    first_norm: float | None = None  # of its weights, before its first step
    norm: float | None = None  # the last that was finite
    lr: float | None = None  # of its last step


@dataclass(slots=True, kw_only=True)
class ReplayStep:
    """A training step to replay."""

    # Forward and, if wanted, backward; returns the loss, or else the function's result.
    run: Callable[[ReplaySettings], Any]
    device: torch.device
    models: Sequence[Module] = ()
    batch: Mapping[str, Tensor] = field(default_factory=dict)  # input tensors by name
    precision: str = "fp32"  # "": that of autocast, if some module runs under it
    scale: float = 1.0  # loss scale when it failed
    random: Mapping[str, Any] | None = None  # random state at its beginning; None: the current one
    loss: float | None = None  # of the original step
    ran: bool = True  # it has run before, so its output has been printed already
    step: int | None = None
    untrained: bool = False  # no step before it has changed the weights
    optimizers: Sequence[Optimizer] = ()
    pasts: Sequence[OptimizerPast] = ()  # of the optimizers
    others: Sequence[Module] = ()  # models that ran and are not in ``models``: a teacher
    compiled: bool = False  # torch.compile has compiled a part of it
    remarks: tuple[str, ...] = ()
    # The same with an earlier batch, whose loss was finite.
    usual: Callable[[ReplaySettings], Any] | None = None
    touched: Sequence[Any] = ()  # the user's function or objects, whose variables are to be restored

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the models by name, and those that only the optimizers have."""
        found = self._named("named_parameters")
        known = set(map(id, found.values()))
        for optimizer in self.optimizers:
            every = [each for group in optimizer.param_groups for each in group["params"]]
            loose = {f"parameter {number} of {type(optimizer).__name__}": each for number, each in enumerate(every, 1)}
            found |= {name: each for name, each in loose.items() if id(each) not in known}
        return found

    def buffers(self) -> dict[str, Tensor]:
        return self._named("named_buffers")

    def evaluating(self) -> list[str]:
        """Return the names of the modules in evaluation mode."""
        return [name for name, module in self.named_modules() if not module.training]

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules by the names they have in the unwrapped models."""
        for prefix, model in zip(model_prefixes(self.models), self.models, strict=True):
            for path, module in named_modules(model).items():
                yield ".".join(part for part in (prefix, path) if part), module

    def _named(self, which: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path, module in self.named_modules():
            for name, tensor in getattr(module, which)(recurse=False):
                found.setdefault(f"{path}.{name}" if path else name, tensor)
        return found


class ReplayResult(NamedTuple):
    """Result of one replay: its loss, and which gradients are not finite."""

    loss: float | None  # the largest magnitude, if it is not a scalar
    bad: tuple[str, ...]  # parameters whose gradients are not finite
    gradients: int
    vanished: bool = False  # all gradients are zero

    @property
    def finite(self) -> bool:
        return (self.loss is None or math.isfinite(self.loss)) and not self.bad


class RecordedReplay(NamedTuple):
    """A replay with its recorded operations."""

    tape: Tape
    ended: ReplayResult
    results: list[TensorRead]  # the tensors that the function returned
    gradients: dict[str, TensorRead]
    spoiled: list[TensorRead]  # weights that the run has made bad


class Replay:
    """Context in which a step can be replayed; its end restores random state, gradients and all memory."""

    def __init__(self, subject: ReplayStep) -> None:
        self.subject = subject
        self._parameters = subject.parameters()
        self._attributes = PythonState()  # of the models, and what the function can reach
        self._stack = ExitStack()

    def __enter__(self) -> Replay:
        now = capture_random(self.subject.device)
        self._start = {**now, **(self.subject.random or {})}
        self._stack.callback(restore_random, now, self.subject.device)
        elsewhere = {each.device for each in self._parameters.values()} - {self.subject.device}
        for device in elsewhere:  # parts of a model on other devices draw from those devices' generators
            self._stack.callback(restore_random, capture_random(device, host=False), device)
        self._stack.enter_context(gc_disabled())
        self._attributes.note([*self.subject.models, *self.subject.touched])
        self._stack.enter_context(self._attributes.with_optimizers())
        self._stack.callback(_set_gradients, [(each, each.grad) for each in self._parameters.values()])
        self._stack.enter_context(run_eagerly())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def plain(
        self,
        settings: ReplaySettings,
        change: AbstractContextManager[Any] | None = None,
        mode: UndoMode | None = None,
        *,
        run: Callable[[ReplaySettings], Any] | None = None,
    ) -> ReplayResult:
        """Run the step, or another function, once, without recording."""
        mode = mode or UndoMode()
        with self._undone(mode):
            with self._applied(settings), change or nullcontext(), mode:
                result = (run or self.subject.run)(settings)
            return self._ended(result)

    def compiled(self, settings: ReplaySettings, backend: str | None = None) -> ReplayResult:
        """Run the step once as torch.compile has compiled it, or as it compiles it with another backend."""
        # Not under a mode that notes writes: then nothing would be compiled, and generated code calls no operations.
        before = [(each, each.detach().clone()) for each in self.subject.buffers().values()]
        forced: dict[str, Any] = {} if backend is None else {"force_backend": backend}
        try:
            with self._applied(settings), torch.compiler.set_stance("default", **forced):
                result = self.subject.run(settings)
            return self._ended(result)
        finally:
            for buffer, values in before:
                overwrite(buffer, values)
            self._attributes.put_back()
            self._drop_gradients()

    def _ended(self, result: Any) -> ReplayResult:
        """Measure what a run returned, and the gradients that it left."""
        first = next(iter(tensors_of(result)), None)
        values = None if first is None else readable_values(first)
        loss = None if first is None else 0.0
        if values is not None:
            loss = float(values.abs().max() if values.numel() > 1 else values.reshape(()))
        ranges = ValueRanges()
        slots = {name: ranges.add(each.grad) for name, each in self._parameters.items() if each.grad is not None}
        ranges.settle()
        bad = tuple(name for name, slot in slots.items() if ranges.bad(slot))
        vanished = bool(slots) and all(ranges[slot] == (0, 0) for slot in slots.values())
        return ReplayResult(loss, bad, len(slots), vanished)

    def taped(self, settings: ReplaySettings) -> RecordedReplay:
        """Run the step once, recording each operation."""
        subject, paths = self.subject, ModulePaths(self.subject.models, self._attributes)
        recorder = OpRecorder(paths)
        with self._undone(recorder):
            with self._applied(settings), paths.watched(), warnings.catch_warnings(), recorder:
                # Torch warns that the hooks run twice for a compiled model, which does not matter here.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
                result = subject.run(settings)
            if not subject.models:  # take on the models that were discovered during the run
                subject.models = tuple(paths.roots)
                self._parameters = subject.parameters()
                had = {id(leaf.tensor): leaf.gradient for leaf in recorder.leaves.values()}
                gradients_before = [(each, had.get(id(each), each.grad)) for each in self._parameters.values()]
                self._stack.callback(_set_gradients, gradients_before)
            given_models = set(map(id, subject.models))
            subject.others = [each for each in paths.roots if id(each) not in given_models]
            subject.precision = subject.precision or paths.precision or "fp32"
            with torch.no_grad():
                return self._measured(recorder, paths, result)

    def _measured(self, recorder: OpRecorder, paths: ModulePaths, result: Any) -> RecordedReplay:
        """Measure the results and gradients of a recorded run."""
        tape = recorder.tape
        tape.has_modules = paths.any_ran
        known = {id(each): name for name, each in self._parameters.items()}
        gradients = {}
        for number, (leaf, _) in enumerate(list(recorder.leaves.values())):
            if leaf.grad is not None:
                gradients[known.get(id(leaf), f"tensor {number + 1}")] = recorder.given(leaf.grad)
        for name, each in self._parameters.items():
            if each.grad is not None and name not in gradients:
                gradients[name] = recorder.given(each.grad)
        results = [recorder.given(tensor) for tensor in tensors_of(result)]
        weights = [recorder.given(leaf) for leaf, _ in list(recorder.leaves.values()) if not leaf._is_view()]
        tape.ranges.settle()
        spoiled = [given for given in weights if given.storage.writers and tape.ranges.bad(given.slot)]
        bad = tuple(name for name, given in gradients.items() if tape.ranges.bad(given.slot))
        loss = None if not results else tape.ranges[results[0].slot][0]
        return RecordedReplay(tape, ReplayResult(loss, bad, len(gradients)), results, gradients, spoiled)

    @contextmanager
    def _undone(self, mode: UndoMode) -> Iterator[None]:
        """Undo at the end of the context what a run under this mode has changed."""
        try:
            yield
        finally:
            mode.put_back()
            self._attributes.put_back()
            self._drop_gradients()

    @contextmanager
    def _applied(self, settings: ReplaySettings) -> Iterator[None]:
        restore_random(self._start, self.subject.device)
        torch.clear_autocast_cache()  # or cached casts of weights would not be repeated
        self._drop_gradients()
        output = muted_output() if self.subject.ran else nullcontext()
        in_fp32 = _kept_in_fp32(self.subject.models, settings.keep)
        # The script may have asked torch to raise an error at the first NaN.
        torch_checks = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)
        with in_fp32, autocast_forced_to(settings.precision, self.subject.device), output, torch_checks:
            yield
        self.subject.ran = True

    def _drop_gradients(self) -> None:
        _set_gradients([(each, None) for each in self._parameters.values()])


def _set_gradients(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function returned, the loss first."""
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


def is_finite(tensor: Tensor) -> bool:
    """Return whether this rank's shard is finite; True if its values cannot be read."""
    values = readable_values(local_shard(tensor))
    return values is None or bool(values.isfinite().all())


def is_compiled(thing: Any) -> bool:
    """Return whether torch.compile has compiled this function, or any part of this model."""
    if isinstance(thing, Module):
        return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in thing.modules())
    return hasattr(thing, "_torchdynamo_orig_callable")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection within the context.

    A replay creates thousands of objects, and collecting garbage among all objects of a program takes as long as a
    step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _kept_in_fp32(models: Sequence[Module], path: str | None) -> Iterator[None]:
    """Run the modules that match ``path`` in FP32 within the context."""
    named = [pair for model in models for pair in named_modules(model).items() if path]
    found = list(dict.fromkeys(module for name, module in named if fnmatchcase(name, path or "")))
    found = [module for module in found if type(module).forward is not Module.forward]
    before = [(module, module.__dict__.get("forward")) for module in found]
    for module in found:
        module.forward = wrap_forward("fp32", module)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


@contextmanager
def autocast_forced_to(name: str | None, device: torch.device) -> Iterator[None]:
    """Within the context, every autocast region uses this precision; None changes nothing."""
    if name is None:
        yield
        return
    dtype = precision_named(name).dtype
    enter: Callable[[Any], Any] = autocast.__enter__

    def entered(self: Any) -> Any:
        # Restore it: the same autocast object may be entered again at each step (a decorator, an attribute).
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

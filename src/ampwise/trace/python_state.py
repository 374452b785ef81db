"""Save and restore Python state (attributes, lists, variables, generators), and mute output, around a replay."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampwise.trace.call_site import code_owner

__all__ = ["PythonState", "attributes_restored", "generator_restorer", "muted_output", "random_position"]

# FSDP swaps gathered weights in and out of it, and keeps track of that itself.
SKIPPED_ATTRIBUTE = "_parameters"
MAX_OBJECTS = 50_000  # objects to save, the nearest first
MAX_ITEMS = 100_000  # items of a list or dict: longer ones are data, which a step does not change
MAX_ARRAY_BYTES = 2**24  # bytes of a numpy array

Restorer = Callable[[], Any]


class PythonState:
    """The Python state that models and functions can reach, saved by ``note`` and restored by ``put_back``.

    Counters, lists, buffers, generators and variables of functions. Among objects of libraries only modules are
    saved: others may be in use elsewhere. copies_arrays: False where they may be large data. freezes_others: arrays
    that are not copied become read-only until ``put_back``.
    """

    def __init__(self, *, copies_arrays: bool = True, freezes_others: bool = False) -> None:
        self._copies_arrays, self._freezes_others = copies_arrays, freezes_others
        self._frozen: dict[int, Any] = {}  # arrays that were made read-only
        self._restores: dict[int, tuple[Any, list[Restorer]]] = {}

    def note(self, things: Iterable[Any]) -> None:
        """Save the state of these objects and of everything they refer to."""
        pending = deque(things)
        while pending and len(self._restores) < MAX_OBJECTS:
            each = pending.popleft()
            if id(each) in self._restores:
                continue
            if _is_array(each) and not (self._copies_arrays and _is_saved(each)):
                if self._freezes_others and each.flags.writeable:
                    each.flags.writeable = False
                    self._frozen[id(each)] = each
            elif _is_saved(each):
                restores, parts = _save(each)
                self._restores[id(each)] = each, restores
                pending.extend(parts)

    @contextmanager
    def with_optimizers(self) -> Iterator[None]:
        """Within the context, save the state of every optimizer before its first step."""

        def note(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self._restores:
                dicts = [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
                found = [each for each in dicts if isinstance(each, dict)]
                self._restores[id(optimizer)] = optimizer, [partial(_restore_dict, d, list(d.items())) for d in found]

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def put_back(self) -> None:
        """Restore everything that was saved."""
        for _, restores in self._restores.values():
            for restore in restores:
                restore()
        for array in sorted(self._frozen.values(), key=lambda array: array.base is not None):  # a view after its base
            array.flags.writeable = True
        self._frozen.clear()


@contextmanager
def attributes_restored(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of these modules at the end of the context."""
    attributes = PythonState()
    attributes.note(models)
    try:
        yield
    finally:
        attributes.put_back()


def _is_saved(thing: Any) -> bool:
    kind = type(thing)
    if kind in (list, tuple, deque) or isinstance(thing, dict | set):
        return len(thing) <= MAX_ITEMS
    if isinstance(thing, nn.Module | torch.Generator | random.Random | MethodType | partial):
        return True
    if isinstance(thing, FunctionType):
        return code_owner(thing.__code__.co_filename) == "own"
    if _is_from_numpy(thing) or kind.__module__ == "__main__":  # a class from a notebook has no file
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and code_owner(file) == "own"


def _is_array(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)


def _is_from_numpy(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if _is_array(thing):
        return bool(thing.flags.writeable and thing.nbytes <= MAX_ARRAY_BYTES)
    return isinstance(thing, numpy.random.Generator | numpy.random.RandomState)


def _save(thing: Any) -> tuple[list[Restorer], Iterable[Any]]:
    """Return functions that restore the contents of an object, and the objects that it refers to."""
    if isinstance(thing, dict):
        return [partial(_restore_dict, thing, list(thing.items()))], thing.values()
    if isinstance(thing, list | deque | tuple):
        return [] if isinstance(thing, tuple) else [partial(_restore_sequence, thing, list(thing))], thing
    if isinstance(thing, set):
        before = set(thing)
        return [partial(thing.intersection_update, before), partial(thing.update, before)], ()
    if (restore := _generator_or_array_restorer(thing)) is not None:
        return [restore], ()
    if isinstance(thing, MethodType):
        return [], (thing.__self__, thing.__func__)
    if isinstance(thing, partial):
        return [], (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, FunctionType):
        return _save_function(thing)
    restores: list[Restorer] = []
    parts: dict[str, Any] = getattr(thing, "__dict__", {})
    if hasattr(thing, "__dict__"):
        restores.append(partial(_restore_dict, parts, list(parts.items())))
    if isinstance(thing, nn.Module):
        plain = [each for each in thing._parameters.values() if type(each) is nn.Parameter]
        restores += [partial(_restore_data, each, each.data) for each in plain]
    return restores, [value for name, value in parts.items() if name != SKIPPED_ATTRIBUTE]


def _generator_or_array_restorer(thing: Any) -> Restorer | None:
    """Return a function that restores a random generator or a numpy array; None for other objects."""
    if _is_array(thing):
        return partial(thing.__setitem__, ..., thing.copy()) if _is_from_numpy(thing) else None
    return generator_restorer(thing)


def generator_restorer(thing: Any) -> Restorer | None:
    """Return a function that sets a random generator to its present state; None for other objects."""
    if isinstance(thing, torch.Generator):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, random.Random):
        return partial(thing.setstate, thing.getstate())
    if not _is_from_numpy(thing):
        return None
    if hasattr(thing, "bit_generator"):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    return partial(thing.set_state, thing.get_state())


def _save_function(function: FunctionType) -> tuple[list[Restorer], Iterable[Any]]:
    """Save the variables of enclosing functions and the global variables that a function uses."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value now
            cells.append((cell, cell.cell_contents))
    known = function.__globals__
    used = {name: known[name] for name in _names(function.__code__) if name in known}
    restores: list[Restorer] = [partial(setattr, cell, "cell_contents", value) for cell, value in cells]
    return [*restores, partial(known.update, used)], [*(value for _, value in cells), *used.values()]


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _restore_dict(value: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(value.items())
    if len(now) != len(before) or any(a is not b or x is not y for (a, x), (b, y) in zip(now, before, strict=True)):
        value.clear()
        value.update(before)


def _restore_sequence(value: Any, before: list[Any]) -> None:
    if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
        value.clear()
        value.extend(before)


def _restore_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Undo ``weight.data = ...``, which replaces the storage and shows up as no operation."""
    if parameter.data_ptr() != data.data_ptr():
        parameter.data = data


@contextmanager
def muted_output() -> Iterator[None]:
    """Drop what this thread prints: a replay prints what the step has printed already."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = muted = _MutedStream(out), _MutedStream(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for each in muted:  # a log handler that was set up meanwhile may hold them
            each.muted_thread = None


class _MutedStream:
    """A stream that drops what the current thread writes and passes on what other threads write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.muted_thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.muted_thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def random_position() -> tuple[Any, ...]:
    """Return what changes when random numbers are drawn, without a sync."""
    state = torch.default_generator.get_state()
    offsets: list[int] = []
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        offsets = [each.get_offset() for each in torch.cuda.default_generators]
    return (state.numpy().tobytes(), *offsets)

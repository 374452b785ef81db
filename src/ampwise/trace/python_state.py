"""Save and restore Python state (attributes, lists, variables, generators), and mute output, around a replay."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampwise.trace.call_site import code_owner

__all__ = ["PythonState", "attributes_restored", "muted_output"]

# FSDP swaps gathered weights in and out of it, and keeps track of that itself.
SKIPPED_ATTRIBUTE = "_parameters"
MAX_OBJECTS = 50_000  # objects to save, the nearest first
MAX_ITEMS = 100_000  # items of a list or dict: longer ones are data, which a step does not change
MAX_ARRAY_BYTES = 2**24  # bytes of a numpy array

Restorer = Callable[[], None]


class PythonState:
    """The Python state that models and functions can reach, saved by ``note`` and restored by ``put_back``.

    Counters, lists, buffers, generators and variables of functions. Among objects of libraries only modules are
    saved: others may be in use elsewhere.
    """

    def __init__(self) -> None:
        self._restores: dict[int, tuple[Any, list[Restorer]]] = {}

    def note(self, things: Iterable[Any]) -> None:
        """Save the state of these objects and of everything they refer to."""
        pending = deque(things)
        while pending and len(self._restores) < MAX_OBJECTS:
            each = pending.popleft()
            if id(each) not in self._restores and _is_saved(each):
                self._restores[id(each)] = each, list(_restores_of(each))
                pending.extend(_parts(each))

    @contextmanager
    def with_optimizers(self) -> Iterator[None]:
        """Within the context, save the state of every optimizer before its first step."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self._note_optimizer(optimizer))
        try:
            yield
        finally:
            handle.remove()

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._restores:
            dicts = [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
            restores = [_dict_restorer(each) for each in dicts if isinstance(each, dict)]
            self._restores[id(optimizer)] = optimizer, restores

    def put_back(self) -> None:
        """Restore everything that was saved."""
        for _, restores in self._restores.values():
            for restore in restores:
                restore()


@contextmanager
def attributes_restored(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of these modules at the end of the context."""
    attributes = PythonState()
    attributes.note(models)
    try:
        yield
    finally:
        attributes.put_back()


# Which objects to save


def _is_saved(thing: Any) -> bool:
    kind = type(thing)
    if kind in (list, tuple, deque) or isinstance(thing, dict | set):
        return len(thing) <= MAX_ITEMS
    if isinstance(thing, nn.Module | torch.Generator | random.Random | MethodType | functools.partial):
        return True
    if isinstance(thing, FunctionType):
        return code_owner(thing.__code__.co_filename) == "own"
    return _is_from_numpy(thing) or _is_own(kind)


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's own; one from a notebook has no file."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and code_owner(file) == "own"


def _is_from_numpy(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(thing, numpy.ndarray):
        return bool(thing.flags.writeable and thing.nbytes <= MAX_ARRAY_BYTES)
    return isinstance(thing, numpy.random.Generator | numpy.random.RandomState)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | deque):
        yield from thing
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, FunctionType):
        yield from (value for _, value in _cells(thing))
        yield from _globals(thing).values()
    elif hasattr(thing, "__dict__"):
        yield from (value for name, value in vars(thing).items() if name != SKIPPED_ATTRIBUTE)


def _cells(function: FunctionType) -> Iterator[tuple[Any, Any]]:
    for cell in function.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:  # a variable that has no value now
            continue


def _globals(function: FunctionType) -> dict[str, Any]:
    known = function.__globals__
    return {name: known[name] for name in _names(function.__code__) if name in known}


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


# How to restore them


def _restores_of(thing: Any) -> Iterator[Restorer]:
    """Yield functions that restore the contents of a mutable object."""
    if isinstance(thing, dict):
        yield _dict_restorer(thing)
    elif isinstance(thing, list | deque):
        yield _sequence_restorer(thing)
    elif isinstance(thing, set):
        yield _set_restorer(thing)
    elif isinstance(thing, torch.Generator):
        yield _state_restorer(thing.get_state(), thing.set_state)
    elif isinstance(thing, random.Random):
        yield _state_restorer(thing.getstate(), thing.setstate)
    elif _is_from_numpy(thing):
        yield _numpy_restorer(thing)
    elif isinstance(thing, FunctionType):
        yield from (_cell_restorer(cell, value) for cell, value in _cells(thing))
        yield _globals_restorer(thing.__globals__, _globals(thing))
    elif hasattr(thing, "__dict__") and not isinstance(thing, MethodType | functools.partial):
        yield _dict_restorer(vars(thing))
        if isinstance(thing, nn.Module):
            yield from (_data_restorer(each) for each in thing._parameters.values() if type(each) is nn.Parameter)


def _state_restorer(state: Any, restore: Callable[[Any], Any]) -> Restorer:
    return lambda: restore(state)


def _numpy_restorer(thing: Any) -> Restorer:
    if hasattr(thing, "bit_generator"):
        bits = thing.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if hasattr(thing, "get_state"):
        return _state_restorer(thing.get_state(), thing.set_state)
    return functools.partial(thing.__setitem__, ..., thing.copy())


def _data_restorer(parameter: nn.Parameter) -> Restorer:
    """Undo ``weight.data = ...``, which replaces the storage and shows up as no operation."""
    data = parameter.data

    def restore() -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data

    return restore


def _cell_restorer(cell: Any, before: Any) -> Restorer:
    return lambda: setattr(cell, "cell_contents", before)


def _globals_restorer(known: dict[str, Any], before: dict[str, Any]) -> Restorer:
    def restore() -> None:
        for name, value in before.items():
            if known.get(name) is not value:
                known[name] = value

    return restore


def _dict_restorer(value: dict[Any, Any]) -> Restorer:
    before = list(value.items())

    def restore() -> None:
        now = list(value.items())
        if len(now) != len(before) or any(a is not b or x is not y for (a, x), (b, y) in zip(now, before, strict=True)):
            value.clear()
            value.update(before)

    return restore


def _sequence_restorer(value: Any) -> Restorer:
    before = list(value)

    def restore() -> None:
        if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return restore


def _set_restorer(value: set[Any]) -> Restorer:
    before = set(value)

    def restore() -> None:
        value.intersection_update(before)
        value.update(before)

    return restore


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

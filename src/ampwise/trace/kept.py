"""What a script has in Python's memory, and what it prints: to be as if nothing had run in between."""

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

from ampwise.site import kind_of

__all__ = ["Attributes", "as_they_were", "silent"]

# FSDP puts gathered weights in the places of its own, and knows by itself where it is.
LEFT_ALONE = "_parameters"
MOST = 50_000  # things that are looked at, the nearest first
LONGEST = 100_000  # items of a list or dict: longer ones are data, which nobody changes in a step
LARGEST = 2**24  # bytes of a numpy array

WayBack = Callable[[], None]


class Attributes:
    """What models and functions can reach when they are noted: counters, lists, buffers, generators, variables of
    functions. Of libraries' objects only modules are looked into: others may be busy elsewhere."""

    def __init__(self) -> None:
        self._ways_back: dict[int, tuple[Any, list[WayBack]]] = {}

    def note(self, things: Iterable[Any]) -> None:
        pending = deque(things)
        while pending and len(self._ways_back) < MOST:
            each = pending.popleft()
            if id(each) not in self._ways_back and _is_looked_into(each):
                self._ways_back[id(each)] = each, list(_ways_back(each))
                pending.extend(_parts(each))

    @contextmanager
    def with_optimizers(self) -> Iterator[None]:
        """Those that take a step, from then on."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self._note_optimizer(optimizer))
        try:
            yield
        finally:
            handle.remove()

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._ways_back:
            dicts = [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
            ways = [_refilling_dict(each) for each in dicts if isinstance(each, dict)]
            self._ways_back[id(optimizer)] = optimizer, ways

    def put_back(self) -> None:
        for _, ways in self._ways_back.values():
            for put in ways:
                put()


@contextmanager
def as_they_were(models: Iterable[nn.Module]) -> Iterator[None]:
    """At the end, modules have the attributes that they have now."""
    attributes = Attributes()
    attributes.note(models)
    try:
        yield
    finally:
        attributes.put_back()


# What there is to look into


def _is_looked_into(thing: Any) -> bool:
    kind = type(thing)
    if kind in (list, tuple, deque) or isinstance(thing, dict | set):
        return len(thing) <= LONGEST
    if isinstance(thing, nn.Module | torch.Generator | random.Random | MethodType | functools.partial):
        return True
    if isinstance(thing, FunctionType):
        return kind_of(thing.__code__.co_filename) == "own"
    return _is_numpys(thing) or _is_own(kind)


def _is_own(kind: type) -> bool:
    """A class of the script's; one of a notebook has no file."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and kind_of(file) == "own"


def _is_numpys(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(thing, numpy.ndarray):
        return bool(thing.flags.writeable and thing.nbytes <= LARGEST)
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
        yield from (value for name, value in vars(thing).items() if name != LEFT_ALONE)


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


# Ways back


def _ways_back(thing: Any) -> Iterator[WayBack]:
    """For what can change while it stays the same object."""
    if isinstance(thing, dict):
        yield _refilling_dict(thing)
    elif isinstance(thing, list | deque):
        yield _refilling(thing)
    elif isinstance(thing, set):
        yield _refilling_set(thing)
    elif isinstance(thing, torch.Generator):
        yield _restoring(thing.get_state(), thing.set_state)
    elif isinstance(thing, random.Random):
        yield _restoring(thing.getstate(), thing.setstate)
    elif _is_numpys(thing):
        yield _of_numpys(thing)
    elif isinstance(thing, FunctionType):
        yield from (_refilling_cell(cell, value) for cell, value in _cells(thing))
        yield _rebinding(thing.__globals__, _globals(thing))
    elif hasattr(thing, "__dict__") and not isinstance(thing, MethodType | functools.partial):
        yield _refilling_dict(vars(thing))
        if isinstance(thing, nn.Module):
            yield from (_with_its_memory(each) for each in thing._parameters.values() if type(each) is nn.Parameter)


def _restoring(state: Any, restore: Callable[[Any], Any]) -> WayBack:
    return lambda: restore(state)


def _of_numpys(thing: Any) -> WayBack:
    if hasattr(thing, "bit_generator"):
        bits = thing.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if hasattr(thing, "get_state"):
        return _restoring(thing.get_state(), thing.set_state)
    return functools.partial(thing.__setitem__, ..., thing.copy())


def _with_its_memory(parameter: nn.Parameter) -> WayBack:
    """``weight.data = ...`` gives it another, which no operation tells of."""
    data = parameter.data

    def put() -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data

    return put


def _refilling_cell(cell: Any, before: Any) -> WayBack:
    return lambda: setattr(cell, "cell_contents", before)


def _rebinding(known: dict[str, Any], before: dict[str, Any]) -> WayBack:
    def put() -> None:
        for name, value in before.items():
            if known.get(name) is not value:
                known[name] = value

    return put


def _refilling_dict(value: dict[Any, Any]) -> WayBack:
    before = list(value.items())

    def put() -> None:
        now = list(value.items())
        if len(now) != len(before) or any(a is not b or x is not y for (a, x), (b, y) in zip(now, before, strict=True)):
            value.clear()
            value.update(before)

    return put


def _refilling(value: Any) -> WayBack:
    before = list(value)

    def put() -> None:
        if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return put


def _refilling_set(value: set[Any]) -> WayBack:
    before = set(value)

    def put() -> None:
        value.intersection_update(before)
        value.update(before)

    return put


@contextmanager
def silent() -> Iterator[None]:
    """What this thread prints has been printed before."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = standing = _Others(out), _Others(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for each in standing:  # a log that was set up meanwhile may have them
            each.silenced = None


class _Others:
    """A stream, for all threads but this one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.silenced: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.silenced else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""What a script has in Python's memory, and what it prints: to be as if nothing had run in between."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Attributes", "as_they_were", "silent"]

# FSDP puts gathered weights in the places of its own, and knows by itself where it is.
LEFT_ALONE = "_parameters"


class Attributes:
    """What modules have when they are noted: counters, lists, buffers, generators."""

    def __init__(self) -> None:
        self._ways_back: dict[int, tuple[nn.Module, list[Callable[[], None]]]] = {}

    def note(self, models: Iterable[nn.Module]) -> None:
        for module in (inner for model in models for inner in model.modules()):
            if id(module) not in self._ways_back:
                self._ways_back[id(module)] = module, list(_ways_back(module))

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


def _ways_back(module: nn.Module) -> Iterator[Callable[[], None]]:
    own = vars(module)
    for name, value in list(own.items()):
        way = None if name == LEFT_ALONE else _way_back(value)
        if way is not None:
            yield way
    yield _refilling_dict(own)


def _way_back(value: Any) -> Callable[[], None] | None:
    """For what can change while it stays the same object."""
    if isinstance(value, dict):
        return _refilling_dict(value)
    if isinstance(value, list | deque):
        return _refilling(value)
    if isinstance(value, set):
        return _refilling_set(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _restore(value, state)
    if isinstance(value, random.Random):
        earlier = value.getstate()
        return lambda: value.setstate(earlier)
    return None


def _restore(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _refilling_dict(value: dict[Any, Any]) -> Callable[[], None]:
    before = list(value.items())

    def put() -> None:
        now = list(value.items())
        if len(now) != len(before) or any(a is not b or x is not y for (a, x), (b, y) in zip(now, before, strict=True)):
            value.clear()
            value.update(before)

    return put


def _refilling(value: Any) -> Callable[[], None]:
    before = list(value)

    def put() -> None:
        if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return put


def _refilling_set(value: set[Any]) -> Callable[[], None]:
    before = set(value)

    def put() -> None:
        value.intersection_update(before)
        value.update(before)

    return put


@contextmanager
def silent() -> Iterator[None]:
    """What this thread prints has been printed before."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Others(out), _Others(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


class _Others:
    """A stream, for all threads but this one."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

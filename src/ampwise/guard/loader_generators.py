"""Random number generators held by a loader's parts: samplers, datasets, transforms, collators.

They are found by walking attributes, so that a sampler with ``self.rng = random.Random(0)`` continues exactly in a
resumed run. The global generators of Python, numpy and torch are saved with the engine's state.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["load_states", "states_of", "unsaveable"]

DEEPEST = 8  # levels of attributes
MOST_OBJECTS = 2_000  # objects visited
LONGEST = 100  # items of a list or dict: longer ones hold samples
RUNNING = "_iterator"  # attribute of a DataLoader with its workers and queues
POSITIONS = {"pos": 624, "buffer_pos": 4}  # limits in numpy's states: numpy reads memory at any number given
LEAVES = (str, bytes, int, float, complex, bool, torch.Tensor, ModuleType, type)


def states_of(loader: Any) -> dict[str, Any]:
    """Return the state of each generator, by its attribute path such as "sampler.rng"."""
    return {name: _state(each) for name, each in _found(loader).items() if not isinstance(each, random.SystemRandom)}


def load_states(loader: Any, states: Mapping[str, Any]) -> list[str]:
    """Restore generators from ``states``; return the names found only in the loader or only in ``states``."""
    found = {name: each for name, each in _found(loader).items() if not isinstance(each, random.SystemRandom)}
    for name, generator in found.items():
        if name in states:
            _load(generator, states[name])
    return sorted(found.keys() ^ states.keys())


def unsaveable(loader: Any) -> list[str]:
    """Return the paths of generators that draw from the operating system and cannot be restored."""
    return [name for name, each in _found(loader).items() if isinstance(each, random.SystemRandom)]


def _found(loader: Any) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    known = {id(random._inst), id(torch.default_generator)}
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
        known.add(id(numpy.random.mtrand._rand))
    found: dict[str, Any] = {}
    pending: deque[tuple[str, Any, int]] = deque([("", loader, 0)])
    seen = 0
    while pending and seen < MOST_OBJECTS:
        name, value, depth = pending.popleft()
        if id(value) in known:
            continue
        known.add(id(value))
        seen += 1
        if isinstance(value, kinds):
            found[name] = value
        elif depth < DEEPEST:
            pending.extend((f"{name}.{key}".lstrip("."), each, depth + 1) for key, each in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object without running any of its code."""
    if isinstance(value, Mapping):
        items: Any = value.items() if type(value) is dict and len(value) <= LONGEST else ()
    elif isinstance(value, list | tuple):
        items = enumerate(value) if len(value) <= LONGEST else ()
    elif isinstance(value, MethodType):
        items = [("self", value.__self__)]
    elif isinstance(value, partial):
        items = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, FunctionType):
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        items = [(key, _content(cell)) for key, cell in names]
    else:
        items = _attributes(value).items()
    return ((str(key), each) for key, each in items if not isinstance(each, LEAVES) and each is not None)


def _attributes(value: Any) -> dict[str, Any]:
    held = getattr(value, "__dict__", None)
    return {key: each for key, each in held.items() if key != RUNNING} if type(held) is dict else {}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _load(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _refuse_positions(state)
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _refuse_positions(state: Mapping[str, Any]) -> None:
    for key, value in [*state.items(), *state["state"].items()]:
        if key in POSITIONS and not 0 <= value <= POSITIONS[key]:
            raise ValueError("invalid state of a numpy generator")

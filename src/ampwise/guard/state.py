"""The whole state of a training: tensors by name, and plain data. What is put back goes on as if nothing had been.

Tensors are named as in a model that nothing wraps, so that a state fits with and without DDP, FSDP2 and torch.compile.
One that is there under two names, such as a tied weight, is named once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampwise.engine.engine import Engine
from ampwise.engine.precision.policy import named_modules, with_wrappers
from ampwise.errors import BadInput
from ampwise.guard.nested import join, split
from ampwise.trace.ranges import local

__all__ = ["Live", "Whole"]

Plain = dict[str, Any]


@dataclass(slots=True)
class Live:
    """The state as it is: tensors that training writes to, and a copy of the rest."""

    tensors: dict[str, Tensor]
    plain: Plain
    moving: frozenset[str]  # names of those that a forward pass changes: buffers


class Whole:
    """Of an engine, and of what the user names besides: objects with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, engine: Engine, others: Mapping[str, Any]) -> None:
        self._engine, self._others = engine, dict(others)
        _refuse_unknown(engine.models, self._others)

    def live(self) -> Live:
        """Waits for the last step."""
        models = dict(_models(self._engine.models, self._others))
        tensors: dict[str, Tensor] = {}
        moving: set[str] = set()
        seen: set[int] = set()
        for prefix, model in models.items():
            for name, tensor, is_buffer in _tensors_of(model, seen):
                tensors[f"{prefix}.{name}"] = tensor
                # Of what the user names, nobody knows when it changes.
                moving |= {f"{prefix}.{name}"} if is_buffer or prefix.startswith("other.") else set()
        plain: Plain = {
            "engine": copy.deepcopy(self._engine.state_dict()),  # a scheduler gives what it goes on writing to
            "modules": {prefix: _extra_states(model) for prefix, model in models.items()},
            "optimizers": [],
            "others": {},
        }
        names = self._parameter_names()
        for place, optimizer in enumerate(self._engine.optimizers):
            found, rest = _optimizer_state(optimizer, names)
            tensors.update({f"optimizer.{place}.{name}": tensor for name, tensor in found.items()})
            plain["optimizers"].append(rest)
        for name, other in self._others.items():
            if not isinstance(other, Module):
                found, plain["others"][name] = split(other.state_dict(), f"other.{name}")
                tensors.update(found)
                moving.update(found)
        return Live(tensors, plain, frozenset(moving))

    def prepare(self, plain: Plain) -> dict[str, Tensor]:
        """Live tensors for a state from elsewhere to be read into, with those of optimizers made where there are none.

        Nothing that training goes by has changed after it, but for memory that optimizers have.
        """
        if len(plain["optimizers"]) != len(self._engine.optimizers):
            raise BadInput(
                f"the state has {len(plain['optimizers'])} optimizers, and this engine {len(self._engine.optimizers)}."
            )
        if missing := [name for name in plain["others"] if name not in self._others]:
            raise BadInput(f"the state has {missing[0][:80]!r}, and Guard(state=...) does not name it.")
        self._make_rooms(plain)
        handed_over = _handed_over(plain)
        return {name: each for name, each in self.live().tensors.items() if not name.startswith(handed_over)}

    def put_back(self, values: Mapping[str, Tensor], plain: Plain, *, other_precision: bool = False) -> None:
        """The state as it was: ``values`` has this rank's part of each tensor, on any device."""
        self._make_rooms(plain)
        live = self.live().tensors
        handed_over = _handed_over(plain)
        with torch.no_grad():
            for name, value in values.items():
                if name in live and not name.startswith(handed_over):
                    local(live[name]).copy_(value, non_blocking=True)
        self.put_back_plain(plain, values, other_precision=other_precision)

    def put_back_plain(self, plain: Plain, values: Mapping[str, Tensor], *, other_precision: bool = False) -> None:
        """The rest of it, where tensors are there already. ``values``: those of objects that load them themselves."""
        for prefix, model in _models(self._engine.models, self._others):
            _put_extra_states(model, plain["modules"].get(prefix, {}))
        for place, (optimizer, rest) in enumerate(zip(self._engine.optimizers, plain["optimizers"], strict=True)):
            if "nested" in rest:
                optimizer.load_state_dict(join(rest["nested"], values, f"optimizer.{place}"))
            else:
                _put_groups(optimizer, rest["groups"])
        for name, skeleton in plain["others"].items():
            self._others[name].load_state_dict(join(skeleton, values, f"other.{name}"))
        self._engine.load_state_dict(copy.deepcopy(plain["engine"]), other_precision=other_precision)

    def _make_rooms(self, plain: Plain) -> None:
        names = self._parameter_names()
        for optimizer, rest in zip(self._engine.optimizers, plain["optimizers"], strict=True):
            if "nested" not in rest:
                _make_room(optimizer, rest, names)

    def _parameter_names(self) -> dict[int, str]:
        return {
            id(tensor): f"{prefix}.{name}"
            for prefix, model in _models(self._engine.models, self._others)
            for name, tensor, is_buffer in _tensors_of(model, set())
            if not is_buffer
        }


def _handed_over(plain: Plain) -> tuple[str, ...]:
    """What names of tensors begin with that objects load themselves, of whatever shape they are by then."""
    optimizers = (f"optimizer.{place}." for place, rest in enumerate(plain["optimizers"]) if "nested" in rest)
    return (*(f"other.{name}." for name in plain["others"]), *optimizers)


def _models(models: Sequence[Module], others: Mapping[str, Any]) -> Iterator[tuple[str, Module]]:
    for place, model in enumerate(models):
        yield "model" if len(models) == 1 else f"model.{place}", model
    for name, other in others.items():
        if isinstance(other, Module):
            yield f"other.{name}", other


def _refuse_unknown(models: Sequence[Module], others: Mapping[str, Any]) -> None:
    for name, other in others.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadInput(f"Guard(state=...): {name!r} is no name for a state: letters and digits are expected.")
        if not all(callable(getattr(other, way, None)) for way in ("state_dict", "load_state_dict")):
            raise BadInput(f"Guard(state={{{name!r}: ...}}): {type(other).__name__} has no state_dict to save.")
    for module in (module for model in models for module in model.modules()):
        if type(module).__name__ == "FullyShardedDataParallel":
            raise BadInput("Guard: models in FSDP1 are not saved. Use fully_shard (FSDP2), or DDP.")


# --- modules -------------------------------------------------------------------------------------------------------


def _tensors_of(model: Module, seen: set[int]) -> Iterator[tuple[str, Tensor, bool]]:
    """Parameters and buffers, without those that are not to be saved; those too that a wrapper has of its own."""
    names: set[str] = set()
    for prefix, module in with_wrappers(model):
        unsaved = module._non_persistent_buffers_set
        own: list[tuple[str, Tensor | None, bool]] = [(key, each, False) for key, each in module._parameters.items()]
        own += [(key, each, True) for key, each in module._buffers.items() if key not in unsaved]
        for key, tensor, is_buffer in own:
            if tensor is None or id(tensor) in seen:
                continue
            name = f"{prefix}.{key}".lstrip(".")
            while name in names:  # of a wrapper and what it wraps, the latter
                name += "'"
            names.add(name)
            if is_lazy(tensor):
                raise BadInput(f"{name} has no values yet: run the model once before the guard begins.")
            seen.add(id(tensor))
            yield name, tensor, is_buffer


def _extra_states(model: Module) -> dict[str, Any]:
    """What modules have to save besides tensors."""
    return {
        name: copy.deepcopy(module.get_extra_state())
        for name, module in named_modules(model).items()
        if type(module).get_extra_state is not Module.get_extra_state
    }


def _put_extra_states(model: Module, states: Mapping[str, Any]) -> None:
    modules = named_modules(model)
    for name, state in states.items():
        if name in modules:
            modules[name].set_extra_state(copy.deepcopy(state))


# --- optimizers ----------------------------------------------------------------------------------------------------


def _optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], Plain]:
    """By the names of parameters. One that saves itself in a way of its own is asked for that."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        found, skeleton = split(optimizer.state_dict(), "")
        return {name.lstrip("."): tensor for name, tensor in found.items()}, {"nested": skeleton}
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names):
        its = state[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"state.{name}.{key}"] = value
                its[key] = {"tensor": _form(value, parameter)}
            else:
                its[key] = {"plain": copy.deepcopy(value)}
    groups = []
    for place, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found = {key: value for key, value in options.items() if isinstance(value, Tensor)}
        tensors.update({f"group.{place}.{key}": value for key, value in found.items()})
        groups.append({key: copy.deepcopy(value) for key, value in options.items() if key not in found})
    return tensors, {"state": state, "groups": groups}


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    for place, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"unnamed.{place}.{number}"), parameter


def _form(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    """How to make one like it: like its parameter, or of its own shape."""
    alike = value.shape == parameter.shape and value.device == parameter.device
    if not alike and hasattr(value, "placements"):
        raise BadInput(
            f"an optimizer's state of shape {tuple(value.shape)}, spread over ranks otherwise than its parameter, is "
            "not saved."
        )
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": None if alike else list(value.shape),
        "on_device": value.device == parameter.device,
    }


def _make_room(optimizer: Optimizer, rest: Plain, names: Mapping[int, str]) -> None:
    """Have tensors where the state has some, and none where it has none."""
    if len(rest["groups"]) != len(optimizer.param_groups):
        raise BadInput(
            f"the state has {len(rest['groups'])} parameter groups, and {type(optimizer).__name__} has "
            f"{len(optimizer.param_groups)}."
        )
    for name, parameter in _named(optimizer, names):
        wanted = rest["state"].get(name)
        if wanted is None:
            raise BadInput(f"the state has nothing of {name}, which {type(optimizer).__name__} trains.")
        if not wanted:
            optimizer.state.pop(parameter, None)
            continue
        its = optimizer.state[parameter]
        for key in [key for key in its if key not in wanted]:
            del its[key]
        for key, value in wanted.items():
            if "plain" in value:
                its[key] = copy.deepcopy(value["plain"])
            elif not _fits(its.get(key), value["tensor"], parameter):
                its[key] = _made(value["tensor"], parameter)


def _fits(there: Any, form: Mapping[str, Any], parameter: Tensor) -> bool:
    shape = parameter.shape if form["shape"] is None else torch.Size(form["shape"])
    return (
        isinstance(there, Tensor)
        and there.shape == shape
        and there.dtype == _dtype(form["dtype"])
        and (there.device == parameter.device) == form["on_device"]
    )


def _made(form: Mapping[str, Any], parameter: Tensor) -> Tensor:
    dtype = _dtype(form["dtype"])
    if form["shape"] is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if form["on_device"] else torch.device("cpu")
    return torch.zeros(form["shape"], dtype=dtype, device=device)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise BadInput(f"the state has tensors of {str(name)[:40]!r}, which this torch does not know.")
    return found


def _put_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(copy.deepcopy(dict(saved)))

"""The whole state of a training: tensors by name, and plain data. What is put back goes on as if nothing had been.

Tensors are named as in a model that nothing wraps, so that a state fits with and without DDP, FSDP2 and torch.compile.
One that is there under two names, such as a tied weight, is named once. Buffers are saved whether they are persistent
or not: a forward pass may read either. Of the latter, which a model can make anew, another shape is no obstacle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampwise.engine.engine import Engine
from ampwise.engine.precision.policy import named_modules, with_wrappers
from ampwise.errors import BadInput
from ampwise.guard.nested import join, split
from ampwise.guard.received import handed_to
from ampwise.guard.stored import as_stored, dtype_called, from_stored, is_writable, name_if_viewed
from ampwise.trace.ranges import local

__all__ = ["Live", "Whole"]

Plain = dict[str, Any]
Form = tuple[torch.dtype, tuple[int, ...]]  # of a tensor that was saved


@dataclass(slots=True)
class Live:
    """The state as it is: tensors that training writes to, and a copy of the rest."""

    tensors: dict[str, Tensor]
    plain: Plain
    moving: frozenset[str]  # names of those that a forward pass changes: buffers
    transient: frozenset[str] = frozenset()  # of buffers that are not persistent


class Whole:
    """Of an engine, and of what the user names besides: objects with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, engine: Engine, others: Mapping[str, Any]) -> None:
        self._engine, self._others = engine, dict(others)
        _refuse_unknown(engine.models, self._others)

    def live(self) -> Live:
        """Waits for the last step."""
        models = dict(_models(self._engine.models, self._others))
        slots = self._slots()
        there = {name: slot for name, slot in slots.items() if slot.tensor is not None}
        tensors = {name: as_stored(slot.tensor, name) for name, slot in there.items() if slot.tensor is not None}
        # Of what the user names, nobody knows when it changes.
        moving = {name for name, slot in there.items() if slot.is_buffer or name.startswith("other.")}
        plain: Plain = {
            "engine": copy.deepcopy(self._engine.state_dict()),  # a scheduler gives what it goes on writing to
            "modules": {prefix: _extra_states(model) for prefix, model in models.items()},
            "buffers": {
                "transient": [name for name, slot in slots.items() if slot.transient],
                "empty": [name for name in slots if name not in there],
            },
            "dtypes": {
                name: viewed
                for name, slot in there.items()
                if slot.tensor is not None and (viewed := name_if_viewed(slot.tensor))
            },
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
        return Live(tensors, plain, frozenset(moving), frozenset(plain["buffers"]["transient"]))

    def prepare(self, plain: Plain, stored: Mapping[str, Form]) -> tuple[dict[str, Tensor], list[str]]:
        """Tensors for a state from elsewhere to be read into, live ones where that can be; and the names of buffers
        that are not persistent and do not fit, of which the model keeps its own.

        Nothing that training goes by has changed after it, but for memory that optimizers have.
        """
        self._refuse_other_training(plain)
        self._make_rooms(plain)
        handed_over = _handed_over(plain)
        live, slots = self.live(), self._slots()
        room, own = {}, []
        for name, tensor in live.tensors.items():
            if name.startswith(handed_over) or (name not in stored and name.startswith("other.")):
                continue
            viewed = live.plain["dtypes"].get(name), plain["dtypes"].get(name)
            if stored.get(name) == (tensor.dtype, tuple(tensor.shape)) and viewed[0] == viewed[1]:
                in_place = name not in slots or not slots[name].is_buffer or is_writable(slots[name].there)
                room[name] = tensor.detach() if in_place else torch.zeros(tensor.shape, dtype=tensor.dtype)
            elif name in live.transient:
                own += [] if name in plain["buffers"]["empty"] else [name]
            elif name not in plain["buffers"]["empty"]:
                _refuse_other_dtype(name, *viewed)
                room[name] = tensor.detach()  # for whoever reads it to refuse
        for name, (dtype, shape) in stored.items():
            is_left_out = name.startswith(("other.", "optimizer."))  # of an object that the script has no more
            if name not in room and (is_left_out or _is_optional(name, plain, slots)):
                room[name] = torch.zeros(shape, dtype=dtype)
                own += [name] if name not in slots and name in plain["buffers"]["transient"] else []
        return room, own

    def _refuse_other_training(self, plain: Plain) -> None:
        if len(plain["optimizers"]) != len(self._engine.optimizers):
            raise BadInput(
                f"the state has {len(plain['optimizers'])} optimizers, and this engine {len(self._engine.optimizers)}."
            )
        modules = [
            str(prefix).removeprefix("other.") for prefix in plain["modules"] if str(prefix).startswith("other.")
        ]
        if missing := [name for name in (*plain["others"], *modules) if name not in self._others]:
            raise BadInput(f"the state has {missing[0][:80]!r}, and Guard(state=...) does not name it.")

    def put_back(self, values: Mapping[str, Tensor], plain: Plain, *, other_precision: bool = False) -> None:
        """The state as it was: ``values`` has this rank's part of each tensor, on any device."""
        self._make_rooms(plain)
        live, slots = self.live().tensors, self._slots()
        buffers = {name: slot for name, slot in slots.items() if slot.is_buffer}
        handed_over = _handed_over(plain)
        with torch.no_grad():
            for name, value in values.items():
                if name in live and name not in buffers and not name.startswith(handed_over):
                    local(live[name]).copy_(value, non_blocking=True)
        for name, slot in buffers.items():
            if name not in values and name not in plain["buffers"]["empty"]:
                slot.remove()  # it has come to be since
        self.put_back_plain(plain, values, other_precision=other_precision)

    def put_back_plain(self, plain: Plain, values: Mapping[str, Tensor], *, other_precision: bool = False) -> None:
        """The rest of it, where weights are there already. ``values``: buffers, and what objects load themselves."""
        self._put_buffers(values, plain)
        for prefix, model in _models(self._engine.models, self._others):
            _put_extra_states(model, plain["modules"].get(prefix, {}))
        for place, (optimizer, rest) in enumerate(zip(self._engine.optimizers, plain["optimizers"], strict=True)):
            if "nested" in rest:
                with handed_to(optimizer):
                    optimizer.load_state_dict(join(rest["nested"], values, f"optimizer.{place}"))
            else:
                _put_groups(optimizer, rest["groups"])
        for name, skeleton in plain["others"].items():
            with handed_to(self._others[name]):
                self._others[name].load_state_dict(join(skeleton, values, f"other.{name}"))
        self._engine.load_state_dict(copy.deepcopy(plain["engine"]), other_precision=other_precision)

    def _make_rooms(self, plain: Plain) -> None:
        names = self._parameter_names()
        for optimizer, rest in zip(self._engine.optimizers, plain["optimizers"], strict=True):
            if "nested" not in rest:
                _make_room(optimizer, rest, names)

    def _put_buffers(self, values: Mapping[str, Tensor], plain: Plain) -> None:
        for name, slot in self._slots().items():
            if slot.is_buffer and name in plain["buffers"]["empty"]:
                slot.assign(None)
            elif slot.is_buffer and name in values:
                viewed = plain["dtypes"].get(name)
                slot.put(values[name], None if viewed is None else dtype_called(viewed), self._engine.device)

    def _slots(self) -> dict[str, Slot]:
        """Parameters and buffers of all modules, by name."""
        seen: dict[int, Slot] = {}
        return {
            f"{prefix}.{slot.name}": slot
            for prefix, model in _models(self._engine.models, self._others)
            for slot in _slots_of(model, seen)
        }

    def parameters(self) -> dict[str, Tensor]:
        """Those of all modules, by name."""
        return {
            name: slot.there for name, slot in self._slots().items() if not slot.is_buffer and slot.tensor is not None
        }

    def _parameter_names(self) -> dict[int, str]:
        return {id(slot.tensor): name for name, slot in self._slots().items() if not slot.is_buffer}


def _is_optional(name: str, plain: Plain, slots: Mapping[str, Slot]) -> bool:
    """A buffer that is not persistent, or one that has no value here yet."""
    return name in plain["buffers"]["transient"] or (name in slots and slots[name].tensor is None)


def _refuse_other_dtype(name: str, here: str | None, saved: str | None) -> None:
    """Of tensors that are stored under another dtype, which may be the same."""
    if here != saved:
        kinds = f"{saved or 'of another dtype'} in the checkpoint, and {here or 'of another dtype'} here"
        raise BadInput(f"{name!r} is {kinds}.")


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


class Slot(NamedTuple):
    """Where modules have a parameter or a buffer, which may be none yet."""

    name: str
    tensor: Tensor | None
    is_buffer: bool
    transient: bool  # a buffer that is not persistent
    places: list[tuple[Module, str]]  # several of one that is tied

    @property
    def there(self) -> Tensor:
        assert self.tensor is not None
        return self.tensor

    def put(self, value: Tensor, viewed: torch.dtype | None, device: torch.device) -> None:
        """Values as they were stored: in place where they fit, else in a tensor of their own."""
        tensor = self.tensor
        if tensor is not None and hasattr(tensor, "_local_tensor"):
            local(tensor).detach().copy_(value, non_blocking=True)
            return
        if tensor is not None and is_writable(tensor):
            target = as_stored(tensor, self.name).detach()
            if target.dtype == value.dtype and target.shape == value.shape and tensor.dtype == (viewed or value.dtype):
                target.copy_(value, non_blocking=True)
                return
        values = from_stored(value, viewed)
        self.assign(values.to(device if tensor is None else tensor.device, copy=True))

    def assign(self, tensor: Tensor | None) -> None:
        for module, key in self.places:
            module._buffers[key] = tensor

    def remove(self) -> None:
        for module, key in self.places:
            module._buffers.pop(key, None)
            module._non_persistent_buffers_set.discard(key)


def _slots_of(model: Module, seen: dict[int, Slot]) -> Iterator[Slot]:
    """Parameters and buffers, those too that a wrapper has of its own; ``seen``: the tensors that have a name."""
    names: set[str] = set()
    for prefix, module in with_wrappers(model):
        own: list[tuple[str, Tensor | None, bool]] = [
            (key, each, False) for key, each in module._parameters.items() if each is not None
        ]
        own += [(key, each, True) for key, each in module._buffers.items()]
        for key, tensor, is_buffer in own:
            if tensor is not None and id(tensor) in seen:
                seen[id(tensor)].places.append((module, key))
                continue
            name = f"{prefix}.{key}".lstrip(".")
            while name in names:  # of a wrapper and what it wraps, the latter
                name += "'"
            names.add(name)
            if tensor is not None and is_lazy(tensor):
                raise BadInput(f"{name} has no values yet: run the model once before the guard begins.")
            transient = is_buffer and key in module._non_persistent_buffers_set
            slot = Slot(name, tensor, is_buffer, transient, [(module, key)])
            if tensor is not None:
                seen[id(tensor)] = slot
            yield slot


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
            with handed_to(modules[name]):
                modules[name].set_extra_state(copy.deepcopy(state))


# --- optimizers ----------------------------------------------------------------------------------------------------


def _optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], Plain]:
    """By the names of parameters. One that saves itself in a way of its own is asked for that."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        found, skeleton = split(optimizer.state_dict(), "")
        return {name.removeprefix("."): tensor for name, tensor in found.items()}, {"nested": skeleton}
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names):
        its = state[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"state.{name}.{key}"] = as_stored(value, f"{name}.{key}")
                its[key] = {"tensor": _form(value, parameter)}
            else:
                its[key] = {"plain": copy.deepcopy(value)}
    groups = []
    for place, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found = {key: value for key, value in options.items() if isinstance(value, Tensor)}
        tensors.update({f"group.{place}.{key}": as_stored(value, key) for key, value in found.items()})
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
        and there.dtype == dtype_called(form["dtype"])
        and (there.device == parameter.device) == form["on_device"]
    )


def _made(form: Mapping[str, Any], parameter: Tensor) -> Tensor:
    dtype = dtype_called(form["dtype"])
    if form["shape"] is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if form["on_device"] else torch.device("cpu")
    return torch.zeros(form["shape"], dtype=dtype, device=device)


def _put_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(copy.deepcopy(dict(saved)))

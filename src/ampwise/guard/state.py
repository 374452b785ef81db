"""The full state of a training, as named tensors and plain data. After a restore, training continues bit for bit.

Tensors are named as in the unwrapped model, so a state fits with and without DDP, FSDP2 and torch.compile. A tensor
with two names, such as a tied weight, is saved once. Non-persistent buffers are saved, too, because a forward pass may
read them; since a model can recreate them, a different shape is not an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ampwise.errors import AmpwiseError, BadInput, UnsupportedTensor
from ampwise.guard.training import GuardedTraining
from ampwise.runs.plain_data import Encoded, PlainDecoder, PlainEncoder
from ampwise.runs.tensor_files import as_stored, dtype_named, from_stored, original_dtype
from ampwise.trace.value_ranges import local_shard
from ampwise.train.precision.policy import modules_with_wrappers, named_modules
from ampwise.train.step import Step

Plain = dict[str, Any]
DtypeAndShape = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a saved tensor


@dataclass(slots=True)
class LiveState:
    """The current state: the tensors that training uses, and a copy of the plain data."""

    tensors: dict[str, Tensor]
    plain: Plain
    moving: frozenset[str]  # names of tensors that a forward pass may change, such as buffers
    transient: frozenset[str] = frozenset()  # names of non-persistent buffers


class TrainingState:
    """State of an engine and of further objects with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, engine: GuardedTraining, others: Mapping[str, Any]) -> None:
        self._engine, self._others = engine, dict(others)
        for name, other in others.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise BadInput(f"Guard(state=...): {name!r} is not a valid name: expected a Python identifier.")
            if not all(callable(getattr(other, method, None)) for method in ("state_dict", "load_state_dict")):
                raise BadInput(
                    f"Guard(state={{{name!r}: ...}}): {type(other).__name__} has no state_dict and load_state_dict."
                )
        modules = (module for model in engine.models for module in model.modules())
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
            raise BadInput("Guard: FSDP1 models are not supported. Use fully_shard (FSDP2), or DDP.")

    def live(self) -> LiveState:
        """Return the current state; waits for the last step."""
        slots = self._slots()
        there = {name: slot for name, slot in slots.items() if slot.tensor is not None}
        tensors = {name: _as_stored(slot.value, name) for name, slot in there.items()}
        # Objects of the user may change at any time.
        moving = {name for name, slot in there.items() if slot.is_buffer or name.startswith("other.")}
        plain: Plain = {
            "engine": copy.deepcopy(self._engine.state_dict()),  # a scheduler returns objects that it keeps changing
            "modules": {},
            "buffers": {
                "transient": [name for name, slot in slots.items() if slot.transient],
                "empty": [name for name in slots if name not in there],
            },
            "dtypes": {name: viewed for name, slot in there.items() if (viewed := original_dtype(slot.value))},
            "optimizers": [],
            "others": {},
        }
        for prefix, model in _models(self._engine.models, self._others):
            plain["modules"][prefix] = {
                name: copy.deepcopy(module.get_extra_state())
                for name, module in named_modules(model).items()
                if type(module).get_extra_state is not Module.get_extra_state
            }
        names = self._parameter_names()
        for place, optimizer in enumerate(self._engine.optimizers):
            plain["optimizers"].append(_optimizer_state(optimizer, names, f"optimizer.{place}", tensors))
        for name, other in self._others.items():
            if not isinstance(other, Module):
                found: dict[str, Tensor] = {}
                plain["others"][name] = Encoded(PlainEncoder(found).encode(other.state_dict(), f"other.{name}"))
                tensors.update(found)
                moving.update(found)
        return LiveState(tensors, plain, frozenset(moving), frozenset(plain["buffers"]["transient"]))

    def prepare(self, plain: Plain, stored: Mapping[str, DtypeAndShape]) -> tuple[dict[str, Tensor], list[str]]:
        """Return tensors to read a checkpoint into, the live ones where possible, and the names of non-persistent
        buffers that do not fit, for which the model keeps its own values.

        This changes no values of the training; it only allocates optimizer state.
        """
        if len(plain["optimizers"]) != len(self._engine.optimizers):
            raise BadInput(
                f"the state has {len(plain['optimizers'])} optimizers; this engine has {len(self._engine.optimizers)}."
            )
        modules = [prefix.removeprefix("other.") for prefix in plain["modules"] if prefix.startswith("other.")]
        if missing := [name for name in (*plain["others"], *modules) if name not in self._others]:
            raise BadInput(f"the state has {missing[0][:80]!r}, and Guard(state=...) does not name it.")
        self._allocate_optimizer_states(plain)
        self_loaded = _self_loaded(plain)
        live, slots = self.live(), self._slots()
        targets, kept = {}, []
        for name, tensor in live.tensors.items():
            if name.startswith(self_loaded) or (name not in stored and name.startswith("other.")):
                continue
            viewed = live.plain["dtypes"].get(name), plain["dtypes"].get(name)
            if stored.get(name) == (tensor.dtype, tuple(tensor.shape)) and viewed[0] == viewed[1]:
                in_place = name not in slots or not slots[name].is_buffer or _is_writable(slots[name].value)
                targets[name] = tensor.detach() if in_place else torch.zeros(tensor.shape, dtype=tensor.dtype)
            elif name in live.transient:
                kept += [] if name in plain["buffers"]["empty"] else [name]
            elif name not in plain["buffers"]["empty"]:
                if viewed[0] != viewed[1]:  # both may be stored under the same dtype
                    here, saved = (each or "of another dtype" for each in viewed)
                    raise BadInput(f"{name!r} is {saved} in the checkpoint, and {here} here.")
                targets[name] = tensor.detach()  # read_into refuses it
        for name, (dtype, shape) in stored.items():
            is_left_out = name.startswith(("other.", "optimizer."))  # of an object that the script no longer has
            is_transient = name in plain["buffers"]["transient"]
            has_no_value = name in slots and slots[name].tensor is None
            if name not in targets and (is_left_out or is_transient or has_no_value):
                targets[name] = torch.zeros(shape, dtype=dtype)
                kept += [name] if name not in slots and is_transient else []
        return targets, kept

    def restore(self, values: Mapping[str, Tensor], plain: Plain, *, other_precision: bool = False) -> None:
        """Restore a state. ``values`` has this rank's part of each tensor, on any device."""
        self._allocate_optimizer_states(plain)
        live, slots = self.live().tensors, self._slots()
        buffers = {name: slot for name, slot in slots.items() if slot.is_buffer}
        self_loaded = _self_loaded(plain)
        with torch.no_grad():
            for name, value in values.items():
                if name in live and name not in buffers and not name.startswith(self_loaded):
                    local_shard(live[name]).copy_(value, non_blocking=True)
        for name, slot in buffers.items():
            if name not in values and name not in plain["buffers"]["empty"]:
                slot.remove()  # it was created later
        self.restore_plain(plain, values, other_precision=other_precision)

    def restore_plain(self, plain: Plain, values: Mapping[str, Tensor], *, other_precision: bool = False) -> None:
        """Restore everything but the weights. ``values``: buffers, and tensors that objects load themselves."""
        for name, slot in self._slots().items():
            if slot.is_buffer and name in plain["buffers"]["empty"]:
                slot.assign(None)
            elif slot.is_buffer and name in values:
                viewed = plain["dtypes"].get(name)
                slot.put(values[name], None if viewed is None else dtype_named(viewed), self._engine.device)
        for prefix, model in _models(self._engine.models, self._others):
            modules = named_modules(model)
            for name, state in plain["modules"].get(prefix, {}).items():
                if name in modules:
                    with _load_errors_as_bad_input(modules[name]):
                        modules[name].set_extra_state(copy.deepcopy(state))
        for optimizer, saved in zip(self._engine.optimizers, plain["optimizers"], strict=True):
            if "nested" in saved:
                with _load_errors_as_bad_input(optimizer):
                    optimizer.load_state_dict(PlainDecoder(values, _device_here).decode(saved["nested"].node))
                continue
            for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
                group.update(copy.deepcopy(dict(options)))
        for name, saved in plain["others"].items():
            with _load_errors_as_bad_input(self._others[name]):
                self._others[name].load_state_dict(PlainDecoder(values, _device_here).decode(saved.node))
        self._engine.load_state_dict(copy.deepcopy(plain["engine"]), other_precision=other_precision)

    def _allocate_optimizer_states(self, plain: Plain) -> None:
        names = self._parameter_names()
        for optimizer, saved in zip(self._engine.optimizers, plain["optimizers"], strict=True):
            if "nested" not in saved:
                _allocate_state(optimizer, saved, names)

    def _slots(self) -> dict[str, TensorSlot]:
        """Return the parameters and buffers of all modules, by name."""
        seen: dict[int, TensorSlot] = {}
        return {
            f"{prefix}.{slot.name}": slot
            for prefix, model in _models(self._engine.models, self._others)
            for slot in _slots_of(model, seen)
        }

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all modules, by name."""
        return {
            name: slot.value for name, slot in self._slots().items() if not slot.is_buffer and slot.tensor is not None
        }

    def _parameter_names(self) -> dict[int, str]:
        return {id(slot.tensor): name for name, slot in self._slots().items() if not slot.is_buffer}


def _self_loaded(plain: Plain) -> tuple[str, ...]:
    """Return the name prefixes of tensors that objects load themselves, in whatever shape."""
    optimizers = (f"optimizer.{place}[" for place, saved in enumerate(plain["optimizers"]) if "nested" in saved)
    return (*(f"other.{name}[" for name in plain["others"]), *optimizers)


def _models(models: Sequence[Module], others: Mapping[str, Any]) -> Iterator[tuple[str, Module]]:
    for place, model in enumerate(models):
        yield "model" if len(models) == 1 else f"model.{place}", model
    for name, other in others.items():
        if isinstance(other, Module):
            yield f"other.{name}", other


def _as_stored(tensor: Tensor, name: str) -> Tensor:
    try:
        return as_stored(tensor, name)
    except UnsupportedTensor as error:
        raise BadInput(f"Guard cannot save {error}") from error


def _device_here(kind: str) -> torch.device:
    """Return the device a tensor was saved from, if this machine has one of that type; else the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(kind if here is not None and here.type == kind else "cpu")


def _is_writable(tensor: Tensor) -> bool:
    """Whether values can be copied into the tensor: no two elements share memory."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def _load_errors_as_bad_input(what: object) -> Iterator[None]:
    """Turn any error that user code raises in ``load_state_dict`` into BadInput."""
    try:
        yield
    except (AmpwiseError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]
        raise BadInput(f"{type(what).__name__} cannot load its saved state ({reason}).") from error


# --- modules -------------------------------------------------------------------------------------------------------


class TensorSlot(NamedTuple):
    """A parameter or buffer in a model; a buffer may be None."""

    name: str
    tensor: Tensor | None
    is_buffer: bool
    transient: bool  # a non-persistent buffer
    places: list[tuple[Module, str]]  # several if the tensor is tied

    @property
    def value(self) -> Tensor:
        assert self.tensor is not None
        return self.tensor

    def put(self, value: Tensor, viewed: torch.dtype | None, device: torch.device) -> None:
        """Set the stored values: in place where they fit, else as a new tensor."""
        tensor = self.tensor
        if tensor is not None and hasattr(tensor, "_local_tensor"):
            local_shard(tensor).detach().copy_(value, non_blocking=True)
            return
        if tensor is not None and _is_writable(tensor):
            target = _as_stored(tensor, self.name).detach()
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


def _slots_of(model: Module, seen: dict[int, TensorSlot]) -> Iterator[TensorSlot]:
    """Yield parameters and buffers, including a wrapper's own; ``seen``: tensors that already have a name."""
    names: set[str] = set()
    for prefix, module in modules_with_wrappers(model):
        tensors: list[tuple[str, Tensor | None, bool]] = [
            (key, each, False) for key, each in module._parameters.items() if each is not None
        ]
        tensors += [(key, each, True) for key, each in module._buffers.items()]
        for key, tensor, is_buffer in tensors:
            if tensor is not None and id(tensor) in seen:
                seen[id(tensor)].places.append((module, key))
                continue
            name = f"{prefix}.{key}".lstrip(".")
            while name in names:  # a wrapper and its inner module have the same name
                name += "'"
            names.add(name)
            if tensor is not None and is_lazy(tensor):
                raise BadInput(f"{name} is not initialized yet: run the model once before the guard starts.")
            transient = is_buffer and key in module._non_persistent_buffers_set
            slot = TensorSlot(name, tensor, is_buffer, transient, [(module, key)])
            if tensor is not None:
                seen[id(tensor)] = slot
            yield slot


# --- optimizers ----------------------------------------------------------------------------------------------------


def _optimizer_state(optimizer: Optimizer, names: Mapping[int, str], prefix: str, tensors: dict[str, Tensor]) -> Plain:
    """Return an optimizer's state by parameter names, and put its tensors into ``tensors``.

    Of an optimizer with its own ``state_dict``, that is saved.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return {"nested": Encoded(PlainEncoder(tensors).encode(optimizer.state_dict(), prefix))}
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names):
        entry = state[name] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.state.{name}.{key}"] = _as_stored(value, f"{name}.{key}")
                entry[key] = {"tensor": _form(value, parameter)}
            else:
                entry[key] = {"plain": copy.deepcopy(value)}
    groups: list[Plain] = []
    for place, group in enumerate(optimizer.param_groups):
        groups.append({})
        for key, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.group.{place}.{key}"] = _as_stored(value, key)
            elif key not in ("params", "param_names"):
                groups[-1][key] = copy.deepcopy(value)
    return {"state": state, "groups": groups}


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    for place, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"unnamed.{place}.{number}"), parameter


def _form(value: Tensor, parameter: Tensor) -> dict[str, Any]:
    """Describe how to allocate a state tensor: like its parameter, or with its own shape."""
    alike = value.shape == parameter.shape and value.device == parameter.device
    if not alike and hasattr(value, "placements"):
        raise BadInput(
            f"optimizer state of shape {tuple(value.shape)} is sharded differently from its parameter, which is not "
            "supported."
        )
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": None if alike else list(value.shape),
        "on_device": value.device == parameter.device,
    }


def _allocate_state(optimizer: Optimizer, saved: Plain, names: Mapping[int, str]) -> None:
    """Allocate the tensors that the saved state has, and remove those that it does not have."""
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise BadInput(
            f"the state has {len(saved['groups'])} parameter groups; {type(optimizer).__name__} has "
            f"{len(optimizer.param_groups)}."
        )
    for name, parameter in _named(optimizer, names):
        wanted = saved["state"].get(name)
        if wanted is None:
            raise BadInput(f"the state does not have {name}, which {type(optimizer).__name__} trains.")
        if not wanted:
            optimizer.state.pop(parameter, None)
            continue
        entry = optimizer.state[parameter]
        for key in [key for key in entry if key not in wanted]:
            del entry[key]
        for key, value in wanted.items():
            if "plain" in value:
                entry[key] = copy.deepcopy(value["plain"])
                continue
            form, present = value["tensor"], entry.get(key)
            fits = (
                isinstance(present, Tensor)
                and present.shape == (parameter.shape if form["shape"] is None else torch.Size(form["shape"]))
                and present.dtype == dtype_named(form["dtype"])
                and (present.device == parameter.device) == form["on_device"]
            )
            if not fits:
                entry[key] = _allocate(form, parameter)


def _allocate(form: Mapping[str, Any], parameter: Tensor) -> Tensor:
    dtype = dtype_named(form["dtype"])
    if form["shape"] is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if form["on_device"] else torch.device("cpu")
    return torch.zeros(form["shape"], dtype=dtype, device=device)


# --- weight averages ------------------------------------------------------------------------------------------------


class AveragedModels:
    """The weight averages (EMA, SWA) that a guard saves, which leave out steps that were skipped or undone."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._models = [each for each in state.values() if isinstance(each, AveragedModel)]
        self.last: Step | None = None  # the last completed step

    def hook(self) -> None:
        for average in self._models:
            vars(average)["update_parameters"] = GuardedUpdate(average, self)

    def unhook(self) -> None:
        for average in self._models:
            vars(average).pop("update_parameters", None)


class GuardedUpdate:
    """Replacement for an AveragedModel's ``update_parameters`` that does nothing if the last step was not applied.

    It waits for that step's result.
    """

    def __init__(self, average: AveragedModel, averages: AveragedModels) -> None:
        self._average, self._averages = average, averages  # not the guard, which is to be freed when unused

    def __call__(self, model: Module) -> None:
        last = self._averages.last
        if last is None or last.applied:
            type(self._average).update_parameters(self._average, model)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled average gets its own method back: it does not belong to the guard.
        return getattr, (self._average, "update_parameters")

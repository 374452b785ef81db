"""Validation of a checkpoint's plain state before it is used: a checkpoint may come from anyone.

A forged checkpoint can have valid checksums. So every part must have the type that ``TrainingState.live`` and the guard
save, and tensors are allocated only if the files contain them, in the shapes stored there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ampwise.runs.json_lines import is_count
from ampwise.runs.plain_data import Encoded
from ampwise.runs.tensor_files import dtype_named, stored_dtype_and_shape
from ampwise.train.engine_state import has_compatible_type, is_plain_number

if TYPE_CHECKING:
    from ampwise.guard.disk.reading import StoredTensorInfo

Kind = TypeVar("Kind")

KEYS = ("engine", "modules", "buffers", "dtypes", "others")  # of the saved state besides "optimizers"; each is a dict


def validate_state(
    plain: Any,
    stored: Mapping[str, StoredTensorInfo],
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
) -> dict[str, Any]:
    """Return ``plain`` if it is valid; raise ValueError with the reason if no guard could have saved it.

    stored: the checkpoint's tensors by name; parameters: this training's parameters, used for their shapes.
    """
    state = _expect(dict, plain, "the state")
    if missing := [name for name in (*KEYS, "optimizers") if name not in state]:
        raise ValueError(f"the state has no {missing[0]!r}")
    for name in KEYS:
        _by_name(state[name], name)
    for name in ("transient", "empty"):
        for each in _expect(list, state["buffers"].get(name), f"buffers.{name}"):
            _expect(str, each, f"buffers.{name}")
    for prefix, states in state["modules"].items():
        _by_name(states, f"modules[{prefix[:80]!r}]")
    for name, saved in state["others"].items():
        _expect(Encoded, saved, f"others[{name[:80]!r}]")
    for place, rest in enumerate(_expect(list, state["optimizers"], "optimizers")):
        where = f"optimizers[{place}]"
        if set(_expect(dict, rest, where)) == {"nested"}:
            _expect(Encoded, rest["nested"], where)
        else:
            _check_optimizer(rest, where, f"optimizer.{place}.state", stored, parameters)
            groups = optimizers[place].param_groups if place < len(optimizers) else ()
            _check_groups(rest["groups"], groups, f"{where}.groups")
    _check_guard(_expect(dict, state.get("guard", {}), "guard"))
    return state


# --- optimizers ----------------------------------------------------------------------------------------------------


def _check_optimizer(
    rest: Mapping[str, Any],
    where: str,
    prefix: str,
    stored: Mapping[str, StoredTensorInfo],
    parameters: Mapping[str, Tensor],
) -> None:
    if set(rest) != {"state", "groups"}:
        raise ValueError(f"{where} is not the state of an optimizer")
    named = set()
    for name, values in _by_name(rest["state"], f"{where}.state").items():
        for key, value in _by_name(values, f"{where}.state[{name[:80]!r}]").items():
            if set(_expect(dict, value, key)) == {"tensor"}:
                named.add(f"{prefix}.{name}.{key}")
                _check_form(value["tensor"], f"{prefix}.{name}.{key}", stored, parameters.get(name))
            elif set(value) != {"plain"}:
                raise ValueError(f"{where} has {key[:80]!r} of an unknown type")
    if unnamed := {name for name in stored if name.startswith(f"{prefix}.")} - named:
        raise ValueError(f"{where} does not describe {min(unnamed)[:80]!r}")


def _check_form(form: Any, name: str, stored: Mapping[str, StoredTensorInfo], parameter: Tensor | None) -> None:
    """Check that a tensor's description matches the tensor in the files."""
    if not isinstance(form, dict) or set(form) != {"dtype", "shape", "on_device"}:
        raise ValueError(f"{name[:80]!r} has no dtype, shape and on_device")
    if name not in stored:
        raise ValueError(f"{name[:80]!r} is not among the stored tensors")
    shape = None if parameter is None else list(parameter.shape)
    if form["shape"] is not None:
        shape = _expect(list, form["shape"], name)
    dtype = dtype_named(form["dtype"])
    if shape is None:  # the parameter is not trained here
        is_stored = stored_dtype_and_shape(dtype, ())[0] == stored[name].dtype
    else:
        is_stored = all(map(is_count, shape)) and stored_dtype_and_shape(dtype, tuple(shape)) == tuple(stored[name])
    if not is_stored:
        raise ValueError(f"{name[:80]!r} is stored with another shape or dtype")
    _expect(bool, form["on_device"], name)


def _check_groups(groups: Any, there: Sequence[Mapping[str, Any]], where: str) -> None:
    for group in _expect(list, groups, where):
        if "params" in _by_name(group, where):
            raise ValueError(f"{where} has parameters, which must not be restored")
    for saved, present in zip(groups, there, strict=False):  # a different number of groups is refused later
        for key, value in saved.items():
            if key in present and not has_compatible_type(value, present[key]):
                raise ValueError(
                    f"{where} has {ascii(value)[:40]} for {key[:40]!r}, which is {ascii(present[key])[:40]} here"
                )


# --- the guard itself ----------------------------------------------------------------------------------------------


def _check_guard(state: Mapping[str, Any]) -> None:
    """Check the result of ``Recovery.state``, and of ``SpikeDetector.state`` in it."""
    _expect(list, state.get("policies_before", []), "guard.policies_before")
    spikes = state.get("spikes")
    if spikes is None:
        return
    if set(_expect(dict, spikes, "guard.spikes")) != {"seen", "ordinary", "high", "told"}:
        raise ValueError("guard.spikes is not the state of a loss spike detector")
    rows = [(row, 2) for row in _expect(list, spikes["ordinary"], "guard.spikes.ordinary")]
    rows += [(row, 3) for row in _expect(list, spikes["high"], "guard.spikes.high")]
    are_rows = all(isinstance(row, list) and len(row) == length and is_count(row[0]) for row, length in rows)
    numbers = [number for row, _ in rows for number in row[1:]] if are_rows else [None]
    if not is_count(spikes["seen"]) or not isinstance(spikes["told"], bool):
        raise ValueError("guard.spikes has invalid counts")
    if not all(map(is_plain_number, numbers)):
        raise ValueError("guard.spikes has invalid losses")


def _by_name(value: Any, where: str) -> dict[str, Any]:
    for name in _expect(dict, value, where):
        _expect(str, name, where)
    return value  # type: ignore[no-any-return]


def _expect(kind: type[Kind], value: Any, where: str) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: expected {kind.__name__}, got {ascii(value)[:40]}")
    return value

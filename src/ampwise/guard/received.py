"""The plain part of a checkpoint, checked before anything is made by it: a checkpoint may come from anybody.

Who seals a forged one can make its checksums, too. So every part is of the kind that ``Whole.live`` and the guard save,
and room is made for those tensors only that the files have, in the shapes that they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.engine.alike import is_alike, is_number
from ampwise.errors import AmpwiseError, BadInput
from ampwise.guard.stored import dtype_called, form_of_stored
from ampwise.record.lines import is_count

if TYPE_CHECKING:
    from ampwise.guard.disk.reading import Stored

__all__ = ["checked_state", "handed_to"]

Kind = TypeVar("Kind")

KEYS = ("engine", "modules", "buffers", "dtypes", "others")  # what a guard saves besides optimizers, each by name


def checked_state(
    plain: Any, stored: Mapping[str, Stored], parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """The same; ValueError, which says what is wrong, for what no guard saved.

    stored: the tensors of the checkpoint by name; parameters: those of the training, of which shapes are looked at.
    """
    state = _a(dict, plain, "the state")
    if missing := [name for name in (*KEYS, "optimizers") if name not in state]:
        raise ValueError(f"the state has no {missing[0]!r}")
    for name in KEYS:
        _by_name(state[name], name)
    for name in ("transient", "empty"):
        for each in _a(list, state["buffers"].get(name), f"buffers.{name}"):
            _a(str, each, f"buffers.{name}")
    for prefix, states in state["modules"].items():
        _by_name(states, f"modules[{prefix[:80]!r}]")
    for place, rest in enumerate(_a(list, state["optimizers"], "optimizers")):
        where = f"optimizers[{place}]"
        if set(_a(dict, rest, where)) != {"nested"}:
            _check_optimizer(rest, where, f"optimizer.{place}.state", stored, parameters)
            groups = optimizers[place].param_groups if place < len(optimizers) else ()
            _check_groups(rest["groups"], groups, f"{where}.groups")
    _check_guard(_a(dict, state.get("guard", {}), "guard"))
    return state


@contextmanager
def handed_to(what: object) -> Iterator[None]:
    """Around a state that is handed to others' code, which says in its own way that it does not take it: BadInput."""
    try:
        yield
    except (AmpwiseError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]
        raise BadInput(f"{type(what).__name__} does not take its state back ({said}).") from error


# --- optimizers ----------------------------------------------------------------------------------------------------


def _check_optimizer(
    rest: Mapping[str, Any], where: str, prefix: str, stored: Mapping[str, Stored], parameters: Mapping[str, Tensor]
) -> None:
    if set(rest) != {"state", "groups"}:
        raise ValueError(f"{where} is no state of an optimizer")
    named = set()
    for name, values in _by_name(rest["state"], f"{where}.state").items():
        for key, value in _by_name(values, f"{where}.state[{name[:80]!r}]").items():
            if set(_a(dict, value, key)) == {"tensor"}:
                named.add(f"{prefix}.{name}.{key}")
                _check_form(value["tensor"], f"{prefix}.{name}.{key}", stored, parameters.get(name))
            elif set(value) != {"plain"}:
                raise ValueError(f"{where} has {key[:80]!r} of a kind that is not known")
    if unnamed := {name for name in stored if name.startswith(f"{prefix}.")} - named:
        raise ValueError(f"{where} does not say what {min(unnamed)[:80]!r} is")


def _check_form(form: Any, name: str, stored: Mapping[str, Stored], parameter: Tensor | None) -> None:
    """How to make a tensor is what the files have of it."""
    if not isinstance(form, dict) or set(form) != {"dtype", "shape", "on_device"}:
        raise ValueError(f"{name[:80]!r} has no form")
    if name not in stored:
        raise ValueError(f"{name[:80]!r} is not among the tensors")
    shape = None if parameter is None else list(parameter.shape)
    if form["shape"] is not None:
        shape = _a(list, form["shape"], name)
    dtype = dtype_called(form["dtype"])
    if shape is None:  # of a parameter that is not trained here
        is_stored = form_of_stored(dtype, ())[0] == stored[name].dtype
    else:
        is_stored = all(map(is_count, shape)) and form_of_stored(dtype, tuple(shape)) == tuple(stored[name])
    if not is_stored:
        raise ValueError(f"{name[:80]!r} is of another shape or dtype among the tensors")
    _a(bool, form["on_device"], name)


def _check_groups(groups: Any, there: Sequence[Mapping[str, Any]], where: str) -> None:
    for group in _a(list, groups, where):
        if "params" in _by_name(group, where):
            raise ValueError(f"{where} has parameters, which are not to be put back")
    for saved, present in zip(groups, there, strict=False):  # another count is refused by name later on
        for key, value in saved.items():
            if key in present and not is_alike(value, present[key]):
                raise ValueError(
                    f"{where} has {ascii(value)[:40]} for {key[:40]!r}, which is {ascii(present[key])[:40]} here"
                )


# --- the guard itself ----------------------------------------------------------------------------------------------


def _check_guard(state: Mapping[str, Any]) -> None:
    """What ``Recovery.state`` gives, and in it what ``SpikeWatch.state`` gives."""
    _a(list, state.get("policies_before", []), "guard.policies_before")
    spikes = state.get("spikes")
    if spikes is None:
        return
    if set(_a(dict, spikes, "guard.spikes")) != {"seen", "ordinary", "usual", "age", "high", "told"}:
        raise ValueError("guard.spikes is no state of what watches the loss")
    usual, told = spikes["usual"], spikes["told"]
    rows = [(row, 2) for row in _a(list, spikes["ordinary"], "guard.spikes.ordinary")]
    rows += [(row, 3) for row in _a(list, spikes["high"], "guard.spikes.high")]
    are_rows = all(isinstance(row, list) and len(row) == length and is_count(row[0]) for row, length in rows)
    numbers = [number for row, _ in rows for number in row[1:]] if are_rows else [None]
    if usual is not None:
        numbers += usual[:2] if isinstance(usual, list) and len(usual) == 3 and isinstance(usual[2], bool) else [None]
    if not all(map(is_count, (spikes["seen"], spikes["age"]))) or not isinstance(told, bool):
        raise ValueError("guard.spikes has counts that are none")
    if not all(map(is_number, numbers)):
        raise ValueError("guard.spikes has losses that are none")


def _by_name(value: Any, where: str) -> dict[str, Any]:
    for name in _a(dict, value, where):
        _a(str, name, where)
    return value  # type: ignore[no-any-return]


def _a(kind: type[Kind], value: Any, where: str) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {ascii(value)[:40]} is there instead of a {kind.__name__}")
    return value

"""The engine's saved state: plain data and tensors, which load without unpickling code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampwise.errors import BadInput
from ampwise.finding.log import log
from ampwise.train.accumulator import Accumulator
from ampwise.train.random_state import plain_random_state, restore_random
from ampwise.train.ranks import rank

__all__ = [
    "VERSION",
    "accumulator_state",
    "check_engine_state",
    "has_compatible_type",
    "is_plain_number",
    "load_accumulator_state",
    "restore_rng",
    "rng_state",
]

VERSION = 2
KEYS = ("precision", "policy", "scaler", "schedulers", "applied_steps", "skipped_steps", "window", "rng")
LARGEST = 2**63  # larger integers overflow as floats


def check_engine_state(state: Any, *, precision: str, policy: Mapping[str, Any], schedulers: int, other: bool) -> None:
    """Raise BadInput unless this is the state of an engine like this one; called before anything is loaded."""
    if not isinstance(state, Mapping) or any(key not in state for key in KEYS):
        missing = [key for key in KEYS if key not in state] if isinstance(state, Mapping) else [type(state).__name__]
        hint = " Try state['engine']." if isinstance(state, Mapping) and "engine" in state else ""
        raise BadInput(
            f"load_state_dict(): not the state of an Engine. Missing or unexpected: {', '.join(missing)}.{hint}"
        )
    if state.get("version") != VERSION:
        raise BadInput(f"load_state_dict(): expected version {VERSION}, got version {state.get('version')}.")
    if len(state["schedulers"]) != schedulers:
        raise BadInput(
            f"load_state_dict(): saved with {len(state['schedulers'])} schedulers, but this engine has {schedulers}."
        )
    if precision == "fp16" == state["precision"] and not state["scaler"]:
        raise BadInput("load_state_dict(): the state of the loss scale is missing.")
    if other:
        if state["window"]["gradients"] is not None and state["precision"] != precision:
            raise BadInput(
                f"load_state_dict(): saved in {state['precision']} between the micro-batches of a step, with gradients "
                f"that do not fit {precision}. Save when step.closed is true."
            )
        return
    if state["precision"] != precision:
        raise BadInput(
            f"load_state_dict(): saved in {state['precision']}, but this engine trains in {precision}. Create it with "
            f"precision={state['precision']!r}; or resume in {precision}: load_state_dict(state, other_precision=True)."
        )
    if state["policy"]["keep"] != policy["keep"]:
        raise BadInput(
            "load_state_dict(): saved with another policy. Create the engine with "
            "precision=Policy.from_dict(state['policy']); or resume: load_state_dict(state, other_precision=True)."
        )


def accumulator_state(
    window: Accumulator, parameters: Sequence[Parameter], statistics: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the accumulator's state; an open window includes its gradients, still multiplied by the loss scale."""
    gradients = None
    if window.has_gradients:
        gradients = [None if each.grad is None else each.grad.detach().clone() for each in parameters]
    return {
        "length": window.length,
        "divisor": window.divisor,
        "count": window.count,
        "loss": window.loss,
        "total": window.total,
        "unit": window.unit,
        "gradients": gradients,
        "statistics": statistics if window.has_gradients else None,
    }


def load_accumulator_state(window: Accumulator, saved: Mapping[str, Any], parameters: Sequence[Parameter]) -> None:
    """Restore the accumulator and the gradients of an open window."""
    for key in ("length", "divisor", "count"):
        if not isinstance(saved[key], int):
            raise BadInput(f"load_state_dict(): the window's {key} is damaged: {saved[key]!r}.")
    for key in ("loss", "total", "unit"):
        if not isinstance(saved[key], Tensor | float | int | None):
            raise BadInput(f"load_state_dict(): the window's {key} is damaged: {saved[key]!r}.")
    if saved["gradients"] is not None and saved["length"] > window.size:
        raise BadInput(
            f"load_state_dict(): saved within a step of {saved['length']} micro-batches, but this engine has "
            f"accumulate={window.size}. Use the same."
        )
    window.reset()
    window.unit = saved["unit"]
    if saved["gradients"] is not None:
        gradients = saved["gradients"]
        if len(gradients) != len(parameters) or any(
            gradient is not None and gradient.shape != parameter.shape
            for gradient, parameter in zip(gradients, parameters, strict=False)
        ):
            raise BadInput("load_state_dict(): the saved gradients belong to a different set of parameters.")
        for gradient, parameter in zip(gradients, parameters, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        window.length, window.divisor, window.count = saved["length"], saved["divisor"], saved["count"]
        window.loss, window.total = saved["loss"], saved["total"]
        window.has_gradients = window.count > 0


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random source in use, with this process's rank."""
    return {"rank": rank(), **plain_random_state(device)}


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore random-number state on the rank where it was saved; log a warning and do nothing on another.

    Restored on all ranks, it would give them the same random numbers: the same dropout everywhere.
    """
    if isinstance(state, Mapping) and state.get("rank", 0) != rank():
        log(
            "warning",
            "load_state_dict(): the random state was saved on rank {} and is not loaded on rank {}. To resume bit for "
            "bit, save the engine's state on every rank.",
            state.get("rank", 0),
            rank(),
        )
        return
    try:
        restore_random(state, device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadInput(f"load_state_dict(): the saved random state is damaged ({error}).") from error


def has_compatible_type(saved: Any, present: Any) -> bool:
    """Return whether the saved value has a type that fits the present one. For a present None, any plain type fits.

    For values of a loaded state, which may come from an untrusted file.

    >>> has_compatible_type(0.1, 3), has_compatible_type((0.9, 1), (0.8, 0.9))
    (True, True)
    >>> has_compatible_type("0.1", 3), has_compatible_type([0.1, None], [0.2])
    (False, False)
    """
    if present is None:
        return saved is None or isinstance(saved, bool | str | list | tuple | dict) or is_plain_number(saved)
    if isinstance(present, bool):
        return saved is None or isinstance(saved, bool)  # None: torch chooses
    if isinstance(present, int | float | Tensor):
        return is_plain_number(saved) or (isinstance(saved, Tensor) and isinstance(present, Tensor))
    if isinstance(present, tuple | list) and type(saved) is type(present):
        models = present if len(saved) == len(present) else present[:1] * len(saved)
        return all(map(has_compatible_type, saved, models))
    return isinstance(saved, type(present))


def is_plain_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGEST)

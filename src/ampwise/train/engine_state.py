"""The engine's saved state: plain data and tensors, which load without unpickling code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ampwise.errors import BadInput
from ampwise.train.accumulator import Accumulator

__all__ = ["VERSION", "accumulator_state", "check_engine_state", "load_accumulator_state"]

VERSION = 2
KEYS = ("precision", "policy", "scaler", "schedulers", "applied_steps", "skipped_steps", "window", "rng")


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
        _load_gradients(parameters, saved["gradients"])
        window.length, window.divisor, window.count = saved["length"], saved["divisor"], saved["count"]
        window.loss, window.total = saved["loss"], saved["total"]


def _load_gradients(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    if len(gradients) != len(parameters) or any(
        gradient is not None and gradient.shape != parameter.shape
        for gradient, parameter in zip(gradients, parameters, strict=False)
    ):
        raise BadInput("load_state_dict(): the saved gradients belong to a different set of parameters.")
    for gradient, parameter in zip(gradients, parameters, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

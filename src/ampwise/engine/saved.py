"""What is saved of an engine: plain data and tensors, which load without unpickling code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ampwise.engine.window import Window
from ampwise.errors import BadInput

__all__ = ["VERSION", "checked_saved", "load_window", "saved_window"]

VERSION = 2
KEYS = ("precision", "policy", "scaler", "schedulers", "applied_steps", "skipped_steps", "window", "rng")


def checked_saved(state: Any, *, precision: str, policy: Mapping[str, Any], schedulers: int, other: bool) -> None:
    """Refuse what is not the state of an engine like this one; nothing has been loaded by then."""
    if not isinstance(state, Mapping) or any(key not in state for key in KEYS):
        missing = [key for key in KEYS if key not in state] if isinstance(state, Mapping) else [type(state).__name__]
        hint = " The one under 'engine' may be." if isinstance(state, Mapping) and "engine" in state else ""
        raise BadInput(
            f"load_state_dict(): not the state of an Engine. Missing or unexpected: {', '.join(missing)}.{hint}"
        )
    if state.get("version") != VERSION:
        raise BadInput(f"load_state_dict(): a state of version {state.get('version')}; this ampwise reads {VERSION}.")
    if len(state["schedulers"]) != schedulers:
        raise BadInput(
            f"load_state_dict(): saved with {len(state['schedulers'])} schedulers, and this engine has {schedulers}."
        )
    if precision == "fp16" == state["precision"] and not state["scaler"]:
        raise BadInput("load_state_dict(): the state of the loss scale is missing.")
    if other:
        if state["window"]["gradients"] is not None and state["precision"] != precision:
            raise BadInput(
                f"load_state_dict(): saved in {state['precision']} in the middle of a window, whose gradients do not "
                f"fit {precision}. Save between windows, when step.closed is true."
            )
        return
    if state["precision"] != precision:
        raise BadInput(
            f"load_state_dict(): saved in {state['precision']}, and this engine trains in {precision}. Make it with "
            f"precision={state['precision']!r}; or go on in {precision}: load_state_dict(state, other_precision=True)."
        )
    if state["policy"]["keep"] != policy["keep"]:
        raise BadInput(
            "load_state_dict(): saved with another policy. Make the engine with "
            "precision=Policy.from_dict(state['policy']); or go on: load_state_dict(state, other_precision=True)."
        )


def saved_window(window: Window, parameters: Sequence[Parameter], statistics: dict[str, Any] | None) -> dict[str, Any]:
    """An open window has gradients, still multiplied by the loss scale."""
    gradients = None
    if window.touched:
        gradients = [None if each.grad is None else each.grad.detach().clone() for each in parameters]
    return {
        "length": window.length,
        "divisor": window.divisor,
        "count": window.count,
        "loss": window.loss,
        "total": window.total,
        "unit": window.unit,
        "gradients": gradients,
        "statistics": statistics if window.touched else None,
    }


def load_window(window: Window, saved: Mapping[str, Any], parameters: Sequence[Parameter]) -> None:
    """Stand where the window stood."""
    for key in ("length", "divisor", "count"):
        if not isinstance(saved[key], int):
            raise BadInput(f"load_state_dict(): the window's {key} is damaged: {saved[key]!r}.")
    for key in ("loss", "total", "unit"):
        if not isinstance(saved[key], Tensor | float | int | None):
            raise BadInput(f"load_state_dict(): the window's {key} is damaged: {saved[key]!r}.")
    if saved["gradients"] is not None and saved["length"] > window.size:
        raise BadInput(
            f"load_state_dict(): saved in a window of {saved['length']} micro-batches, and this engine has "
            f"accumulate={window.size}. Give it the same."
        )
    window.begin()
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
        raise BadInput("load_state_dict(): gradients of an open window were saved, of other parameters than these.")
    for gradient, parameter in zip(gradients, parameters, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

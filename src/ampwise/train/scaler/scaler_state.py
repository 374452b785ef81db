"""Check a scaler's saved state before it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ampwise.errors import BadInput
from ampwise.train.scaler.loss_scale import ScaleLimits, is_number

__all__ = ["COUNT_KEYS", "checked_state"]

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
MOST = 2**31  # torch's counters are int32
COUNT_KEYS = ("overflows_in_a_row", "applied_steps", "skipped_steps")  # added by ampwise; torch's states lack them


def checked_state(state: Any, limits: ScaleLimits) -> dict[str, Any]:
    """Return the state as plain numbers; raise BadInput if it is invalid, before anything is loaded."""
    if not isinstance(state, Mapping) or any(key not in state for key in TORCH_KEYS):
        raise BadInput(f"load_state_dict(): not the state of a GradScaler. {_hint(state)}")
    numbers = {key: _number(key, state[key]) for key in (*TORCH_KEYS, *COUNT_KEYS) if key in state}
    limits.checked_scale(numbers["scale"], "load_state_dict()")
    if not numbers["growth_factor"] > 1:
        raise BadInput(f"load_state_dict(): growth_factor={numbers['growth_factor']}: expected a number above 1.")
    if not 0 < numbers["backoff_factor"] < 1:
        raise BadInput(f"load_state_dict(): backoff_factor={numbers['backoff_factor']}: expected a number from 0 to 1.")
    for key in ("growth_interval", "_growth_tracker", *COUNT_KEYS):
        least = int(key == "growth_interval")
        if key in numbers and not (least <= numbers[key] < MOST and numbers[key] == int(numbers[key])):
            raise BadInput(f"load_state_dict(): {key}={numbers[key]}: expected a whole number, {least} or more.")
    return numbers


def _number(key: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise BadInput(f"load_state_dict(): {key}={value!r}: expected a finite number.")
    return value  # type: ignore[no-any-return]


def _hint(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"Got {type(state).__name__}."
    inside = [key for key, value in state.items() if isinstance(value, Mapping) and "growth_factor" in value]
    if inside:
        return f"Try state[{inside[0]!r}]."
    return f"Missing: {', '.join(key for key in TORCH_KEYS if key not in state)}."

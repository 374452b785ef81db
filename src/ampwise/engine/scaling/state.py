"""Is a scaler's saved state one to go on with?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ampwise.engine.scaling.scale import Limits, is_number
from ampwise.errors import BadInput

__all__ = ["COUNTS", "checked_state"]

TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
MOST = 2**31  # what torch counts with
COUNTS = ("overflows_in_a_row", "applied_steps", "skipped_steps")  # ours, which torch's states do not have


def checked_state(state: Any, limits: Limits) -> dict[str, Any]:
    """The state as plain numbers; an error if training would go wrong with it, and nothing has been loaded by then."""
    if not isinstance(state, Mapping) or any(key not in state for key in TORCHS):
        raise BadInput(f"load_state_dict(): not the state of a GradScaler. {_hint(state)}")
    numbers = {key: _number(key, state[key]) for key in (*TORCHS, *COUNTS) if key in state}
    limits.checked_scale(numbers["scale"], "load_state_dict()")
    if not numbers["growth_factor"] > 1:
        raise BadInput(f"load_state_dict(): growth_factor={numbers['growth_factor']}: a number above 1 is expected.")
    if not 0 < numbers["backoff_factor"] < 1:
        raise BadInput(f"load_state_dict(): backoff_factor={numbers['backoff_factor']}: a number below 1 is expected.")
    for key in ("growth_interval", "_growth_tracker", *COUNTS):
        least = int(key == "growth_interval")
        if key in numbers and not (least <= numbers[key] < MOST and numbers[key] == int(numbers[key])):
            raise BadInput(f"load_state_dict(): {key}={numbers[key]}: a whole number, {least} or more, is expected.")
    return numbers


def _number(key: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise BadInput(f"load_state_dict(): {key}={value!r}: a finite number is expected.")
    return value  # type: ignore[no-any-return]


def _hint(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"It is {type(state).__name__}."
    inside = [key for key, value in state.items() if isinstance(value, Mapping) and "growth_factor" in value]
    if inside:
        return f"The one under {inside[0]!r} seems to be."
    return f"Missing: {', '.join(key for key in TORCHS if key not in state)}."

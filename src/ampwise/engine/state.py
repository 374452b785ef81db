"""Is a scaler's saved state one to go on with?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ampwise.engine.scale import Limits
from ampwise.errors import BadInput

__all__ = ["COUNTS", "check_state"]

COUNTS = ("overflows_in_a_row", "applied_steps", "skipped_steps")  # ours, which torch's states do not have


def check_state(state: Mapping[str, Any], limits: Limits) -> None:
    """Raise if training would go wrong with it; nothing has been loaded by then."""
    missing = [
        key
        for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if key not in state
    ]
    if missing:
        raise BadInput(f"load_state_dict(): not the state of a GradScaler; {', '.join(missing)} missing.")
    scale = _number(state, "scale", above=0.0)
    if not limits.floor <= scale <= limits.ceiling:
        raise BadInput(
            f"load_state_dict(): a scale of {scale:g} lies outside of min_scale={limits.floor:g} and "
            f"max_scale={limits.ceiling:g}. Perhaps the run it comes from had collapsed; other limits would let it in."
        )
    _number(state, "growth_factor", above=1.0)
    if _number(state, "backoff_factor", above=0.0) >= 1.0:
        raise BadInput(f"load_state_dict(): backoff_factor={state['backoff_factor']}: a number below 1 is expected.")
    _number(state, "growth_interval", above=0.0)
    for key in ("_growth_tracker", *COUNTS):
        if key in state:
            _number(state, key, above=-1.0)


def _number(state: Mapping[str, Any], key: str, *, above: float) -> float:
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > above):
        raise BadInput(f"load_state_dict(): {key}={value!r}: a finite number above {above:g} is expected.")
    return value

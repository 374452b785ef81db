"""How long a run waits for its sinks at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ampwise.errors import BadInput

__all__ = ["WaitLimits", "wait_limits"]

VARIABLE = "AMPWISE_SINK_WAIT"
LONGEST = 86_400.0


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Time limits in seconds."""

    still: float = 5.0  # without progress of a sink
    in_all: float = 60.0


def wait_limits() -> WaitLimits:
    """Return the limits from the environment variable, or the defaults."""
    text = os.environ.get(VARIABLE)
    if not text:
        return WaitLimits()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= LONGEST:
        raise BadInput(f"{VARIABLE}={text}: expected a number of seconds from 0 to {LONGEST:.0f}.")
    return WaitLimits(seconds, seconds)

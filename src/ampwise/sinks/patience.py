"""How long the end of a run waits for its sinks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ampwise.errors import BadInput

__all__ = ["Patience", "patience"]

VARIABLE = "AMPWISE_SINK_WAIT"
LONGEST = 86_400.0


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds."""

    still: float = 5.0  # with a sink that gets nothing done
    in_all: float = 60.0


def patience() -> Patience:
    """As the environment has it, or the usual."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Patience()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= LONGEST:
        raise BadInput(f"{VARIABLE}={text}: a number of seconds is expected, from 0 to {LONGEST:.0f}.")
    return Patience(seconds, seconds)

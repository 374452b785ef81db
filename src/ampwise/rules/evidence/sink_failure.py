"""Failures of a sink."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SinkFailure", "SinkPhase"]


class SinkPhase(StrEnum):
    """What the sink was doing when it failed."""

    OPENING = "opening"
    SENDING = "sending"
    CLOSING = "closing"
    WAITING = "waiting"  # for it to finish at the end of the run
    KEEPING_UP = "keeping up"  # it works, but is slower than the training


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailure:
    """A failure of one sink, when it was dropped or at the end of the run."""

    sink: str
    when: SinkPhase
    error: str | None = None  # the error message
    sent: int = 0  # rows
    lost: int = 0  # rows, as far as known
    in_hand: int = 0  # lost rows that were in flight; some of them may have arrived

"""How a sink let down those who wanted the numbers of a run there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SinkTrouble", "When"]


class When(StrEnum):
    """What was being done."""

    OPENING = "opening"
    SENDING = "sending"
    CLOSING = "closing"
    WAITING = "waiting"  # for it to finish, when the run was over
    KEEPING_UP = "keeping up"  # it works, and is slower than the training


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTrouble:
    """One sink of a run, at the moment it was given up, or at its end."""

    sink: str
    when: When
    error: str | None = None  # what it raised, in words
    sent: int = 0  # rows
    lost: int = 0  # rows, as far as is known by then
    in_hand: int = 0  # of the lost: were being sent, and some of them may have come through

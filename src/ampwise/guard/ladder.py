"""The recovery ladder: decide what to do about a bad step.

The decision depends only on facts that are the same on all ranks, so all take the same rung at the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, NamedTuple

from ampwise.errors import BadInput

ON_SPIKE = ("tell", "rollback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Settings of the recovery ladder: each rung is taken when the one before did not help.

    When no rung helps, training stops with a diagnosis, a capsule, and exit code 70.

    Args:
        skips: bad steps in a row that are only skipped. Ordinary overflows, which a lower loss scale fixes, do not
            count.
        rollbacks: how often to go back to the last good snapshot and leave out the batches that failed.
        change_precision: then widen the precision: first the modules that the tracer names to FP32, then everything to
            BF16, TF32, FP32.
        on_spike: when the loss jumps, "tell" reports it and "rollback" goes back.
        healthy: good steps in a row after which a snapshot is trusted, and the counters above start over.
        climb_after: good steps after which to try the previous precision again; doubled if that did not help. None:
            never.

    Raises:
        BadInput: an argument does not fit; the message says what to pass.

    >>> Ladder(skips=5, rollbacks=1).rollbacks
    1
    """

    skips: int = 3
    rollbacks: int = 2
    change_precision: bool = True
    on_spike: str = "tell"
    healthy: int = 20
    climb_after: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("skips", 1), ("rollbacks", 0), ("healthy", 1), ("climb_after", 1)):
            value = getattr(self, field)
            if value is None and field == "climb_after":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"Ladder({field}={value!r}): expected a whole number, {least} or more.")
        if self.on_spike not in ON_SPIKE:
            raise BadInput(f"Ladder(on_spike={self.on_spike!r}): expected 'tell' or 'rollback'.")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a dict, for a manifest."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class LadderFacts(NamedTuple):
    """Facts about a step, the same on all ranks."""

    number: int
    skipped: bool
    loss: float  # mean over ranks
    scale: float
    scaled: bool  # a loss scaler is in use
    floor: float  # minimum loss scale
    spike: bool = False  # the loss jumped

    @property
    def bad(self) -> bool:
        return self.skipped or not math.isfinite(self.loss)

    @property
    def at_floor(self) -> bool:
        return self.scaled and self.scale <= self.floor

    @property
    def settling(self) -> bool:
        """Whether this is an ordinary overflow, which a lower loss scale fixes."""
        return self.skipped and self.scaled and math.isfinite(self.loss) and not self.at_floor


class RecoveryAction(Enum):
    """Action to take after a step."""

    GO_ON = auto()
    SETTLE = auto()  # the loss scale is still decreasing
    SKIP = auto()  # report the skipped step
    ROLL_BACK = auto()
    WIDEN = auto()  # change to a wider precision
    STOP = auto()
    CLIMB = auto()  # return to the previous precision


class LadderState:
    """State of a run on its recovery ladder."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self.streak: list[int] = []  # numbers of bad steps in a row, since the last rung
        self.healthy = 0  # good steps in a row
        self.trouble = 0  # the last bad step, including steps that were undone
        self.rollbacks = 0  # since the run was last healthy
        self.widened = 0  # how often the precision was widened
        self.climb_after = ladder.climb_after  # doubled each time the previous precision failed again
        self._climbed = False  # returned to the previous precision, without a bad step since
        self.tried: list[str] = []  # rungs taken since the run was last healthy, as text

    def move(self, facts: LadderFacts) -> RecoveryAction:
        """Return the action for a step; ROLL_BACK means that ``rung`` has to choose the next rung."""
        if facts.spike and self._ladder.on_spike == "rollback" and not facts.bad:
            self.streak = [facts.number]
            self.healthy, self.trouble = 0, max(self.trouble, facts.number)
            return RecoveryAction.ROLL_BACK
        if not facts.bad:
            self.streak.clear()
            self.healthy += 1
            # Count only past the bad step: earlier steps were good the first time and prove nothing when repeated.
            if self.healthy >= self._ladder.healthy and facts.number >= self.trouble + self._ladder.healthy:
                self.rollbacks = 0
                self.tried.clear()
            if self.widened and self.climb_after is not None and self.healthy >= self.climb_after:
                self.healthy = 0
                return RecoveryAction.CLIMB
            return RecoveryAction.GO_ON
        if facts.settling:
            return RecoveryAction.SETTLE
        self.healthy, self.trouble = 0, max(self.trouble, facts.number)
        self.streak.append(facts.number)
        return RecoveryAction.ROLL_BACK if len(self.streak) >= self._ladder.skips else RecoveryAction.SKIP

    def rung(self, *, goes_back: bool, cause: str, wider: bool, spike: bool = False) -> RecoveryAction:
        """Choose the next rung. goes_back: a rollback would change the state; wider: a wider precision exists."""
        bad_data = cause == "bad-batch"  # no precision fixes it
        if self.rollbacks < self._ladder.rollbacks and (goes_back or bad_data):
            return RecoveryAction.ROLL_BACK
        if spike:  # a repeated spike comes from the data; the loss is finite, so training may continue
            self.streak.clear()
            return RecoveryAction.GO_ON
        if self._ladder.change_precision and wider and not bad_data:
            return RecoveryAction.WIDEN
        return RecoveryAction.STOP

    def taken(self, move: RecoveryAction, text: str) -> None:
        """Record that a rung was taken: counters of the rungs below it start over."""
        self.streak, self.healthy = [], 0
        self.tried.append(text)
        if move is RecoveryAction.ROLL_BACK:
            self.rollbacks += 1
        elif move is RecoveryAction.WIDEN:
            self.rollbacks = 0
            self.widened += 1
            if self._climbed and self.climb_after is not None:
                self.climb_after *= 2  # else a run would alternate between two precisions forever
            self._climbed = False
        elif move is RecoveryAction.CLIMB:
            self.widened -= 1
            self._climbed = True

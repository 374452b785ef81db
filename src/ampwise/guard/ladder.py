"""The recovery ladder: what is to be done about a bad step, from facts alone.

Every rank has the same facts, so that all take the same rung in the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, NamedTuple

from ampwise.errors import BadInput

__all__ = ["Facts", "Ladder", "Move", "Standing"]

ON_SPIKE = ("tell", "rollback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """How a guard climbs: each rung is taken when the one before has not helped.

    skips: bad steps in a row before more is done than to skip them. Ordinary overflows, which a lower loss scale mends,
        are none.
    rollbacks: how often to go back to the last good snapshot and pass over the batches that failed, before the next.
    change_precision: go on wider then: the modules that the tracer names in FP32, then all of it in BF16, TF32, FP32.
    on_spike: "tell" of a jump of the loss, or go back: "rollback".
    healthy: good steps in a row after which a snapshot is trusted, and after which earlier trouble is forgotten.
    climb_after: good steps after which the precision before is tried again, and twice as many if that has not helped;
        None: never.

    Where nothing helps, training stops with a diagnosis, a capsule, and exit code 70.

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
                raise BadInput(f"Ladder({field}={value!r}): a whole number is expected, {least} or more.")
        if self.on_spike not in ON_SPIKE:
            raise BadInput(f"Ladder(on_spike={self.on_spike!r}): 'tell' or 'rollback' is expected.")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a manifest."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Facts(NamedTuple):
    """Of a step, the same on all ranks."""

    number: int
    skipped: bool
    loss: float  # the mean over ranks
    scale: float
    scaled: bool  # a scaler is at work
    floor: float  # of the scale
    spike: bool = False  # the loss jumped

    @property
    def bad(self) -> bool:
        return self.skipped or not math.isfinite(self.loss)

    @property
    def at_floor(self) -> bool:
        return self.scaled and self.scale <= self.floor

    @property
    def settling(self) -> bool:
        """An ordinary overflow: a lower scale mends it."""
        return self.skipped and self.scaled and math.isfinite(self.loss) and not self.at_floor


class Move(Enum):
    """What comes next."""

    GO_ON = auto()
    SETTLE = auto()  # the scale is on its way down
    SKIP = auto()  # and say so
    ROLL_BACK = auto()
    WIDEN = auto()  # the precision
    STOP = auto()
    CLIMB = auto()  # back to the precision before


class Standing:
    """Where a run stands on its ladder."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self.streak: list[int] = []  # numbers of bad steps in a row, since the last rung
        self.healthy = 0  # steps in a row
        self.trouble = 0  # the last step that was bad, also of those that were undone
        self.rollbacks = 0  # since things last were well
        self.widened = 0  # times that the precision was changed
        self.climb_after = ladder.climb_after  # longer after each time that it was in vain
        self._climbed = False  # and nothing was bad since
        self.tried: list[str] = []  # since things last were well, in words

    def move(self, facts: Facts) -> Move:
        """What a step calls for, by its own facts: ROLL_BACK stands for the next rung, whichever it is."""
        if facts.spike and self._ladder.on_spike == "rollback" and not facts.bad:
            self.streak = [facts.number]
            self.healthy, self.trouble = 0, max(self.trouble, facts.number)
            return Move.ROLL_BACK
        if not facts.bad:
            return self._well(facts.number)
        if facts.settling:
            return Move.SETTLE
        self.healthy, self.trouble = 0, max(self.trouble, facts.number)
        self.streak.append(facts.number)
        return Move.ROLL_BACK if len(self.streak) >= self._ladder.skips else Move.SKIP

    def _well(self, number: int) -> Move:
        self.streak.clear()
        self.healthy += 1
        # Beyond it: steps before, which were well the first time, say nothing when they are taken again.
        if self.healthy >= self._ladder.healthy and number >= self.trouble + self._ladder.healthy:
            self.rollbacks = 0
            self.tried.clear()
        if self.widened and self.climb_after is not None and self.healthy >= self.climb_after:
            self.healthy = 0
            return Move.CLIMB
        return Move.GO_ON

    def rung(self, *, goes_back: bool, cause: str, wider: bool, spike: bool = False) -> Move:
        """Which rung it is to be. goes_back: that would change anything; wider: there is a wider precision."""
        of_the_data = cause == "bad-batch"  # which no precision mends
        if self.rollbacks < self._ladder.rollbacks and (goes_back or of_the_data):
            return Move.ROLL_BACK
        if spike:  # that comes again and again belongs to the data; the loss is a number, and training may go on
            self.streak.clear()
            return Move.GO_ON
        if self._ladder.change_precision and wider and not of_the_data:
            return Move.WIDEN
        return Move.STOP

    def taken(self, move: Move, words: str) -> None:
        """A rung was taken: those below it begin anew."""
        self.streak, self.healthy = [], 0
        self.tried.append(words)
        if move is Move.ROLL_BACK:
            self.rollbacks += 1
        elif move is Move.WIDEN:
            self.rollbacks = 0
            self.widened += 1
            if self._climbed and self.climb_after is not None:
                self.climb_after *= 2  # or a run would climb and fall over the same steps for ever
            self._climbed = False
        elif move is Move.CLIMB:
            self.widened -= 1
            self._climbed = True

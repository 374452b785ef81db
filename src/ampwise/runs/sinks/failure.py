"""A sink that failed or fell behind: the run goes on without it, and the sink lacks some of its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampwise.runs.events import LoggedEvent

__all__ = ["SINK_FAILED", "SinkFailure", "SinkPhase"]

SINK_FAILED = "sink-failed"


class SinkPhase(StrEnum):
    """What the sink was doing when it failed."""

    OPENING = "opening"
    SENDING = "sending"
    CLOSING = "closing"
    WAITING = "waiting"  # for it to finish at the end of the run
    KEEPING_UP = "keeping up"  # it works, but is slower than the training


ADVICE = {
    SinkPhase.OPENING: "Fix the reported problem, or choose another target.",
    SinkPhase.SENDING: "Fix the reported problem, or choose another target.",
    SinkPhase.CLOSING: "Check whether the sink has the last rows, and fix the reported problem.",
    SinkPhase.WAITING: "Check whether its server is reachable, or set AMPWISE_SINK_WAIT to more seconds.",
    SinkPhase.KEEPING_UP: "Use a local sink, such as jsonl or tensorboard on this machine.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFailure:
    """A failure of one sink, when it was dropped or at the end of the run."""

    sink: str
    when: SinkPhase
    error: str | None = None  # the error message
    sent: int = 0  # rows
    lost: int = 0  # rows, as far as known
    in_hand: int = 0  # lost rows that were in flight; some of them may have arrived

    @property
    def message(self) -> str:
        unsure = self.in_hand > 1  # a single row in flight is known to be lost
        rows = ("at least " if unsure else "") + ("1 row" if self.sent == 1 else f"{self.sent:,} rows")
        lost = ("up to " if unsure else "") + f"{self.lost:,}"
        dropped = f"{lost} row was dropped" if self.lost == 1 else f"{lost} rows were dropped"
        happened = {
            SinkPhase.OPENING: f"could not be opened: {self.error}",
            SinkPhase.SENDING: f"failed after {rows} and was dropped: {self.error}",
            SinkPhase.CLOSING: f"received {rows}, and failed on closing: {self.error}",
            SinkPhase.WAITING: f"was still busy when the run ended and was abandoned: {rows} sent, {lost} not",
            SinkPhase.KEEPING_UP: f"is slower than the training: {dropped}, {rows} sent",
        }
        return f"the sink `{self.sink}` {happened[self.when]}"

    @property
    def advice(self) -> str:
        return f"{ADVICE[self.when]} The record is complete: `ampwise report RUN`."

    def logged(self) -> LoggedEvent:
        """Return the failure as an event of the run."""
        fields = {"sink": self.sink, "when": str(self.when), "sent": self.sent, "lost": self.lost}
        return LoggedEvent(name=SINK_FAILED, level="warning", message=self.message, advice=self.advice, fields=fields)

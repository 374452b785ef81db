"""What happened to a guarded run, and what the guard did about it: one record for each kind of event.

Numbers and names as the guard knows them; the rules in ``rules/run`` make sentences of them. A text that is not known
is empty. Steps count as the engine's do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CheckpointDamaged",
    "CheckpointFailed",
    "CheckpointLate",
    "ClimbedBack",
    "Fault",
    "LockTakenOver",
    "LossSpike",
    "OutOfMemory",
    "PrecisionChanged",
    "Preempted",
    "RankLost",
    "RanksChanged",
    "RolledBack",
    "ScaleAtFloor",
    "StepSkipped",
    "TrainingStopped",
    "WeightsNotFinite",
]


# The ladder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """A step that changed nothing, though it was no ordinary overflow of scaled gradients."""

    step: int
    loss: float | None
    scale: float | None  # of the loss; None where nothing is scaled
    streak: int  # bad steps in a row, this one included
    scaled: bool  # whether a scaler is at work, and so a lower scale may still help


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAtFloor:
    """Gradients overflow at the lowest loss scale allowed."""

    step: int
    scale: float
    streak: int  # bad steps in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The state of an earlier step was put back."""

    step: int  # at which it was decided
    to_step: int
    source: Literal["memory", "disk"]
    milliseconds: float
    streak: int  # bad steps in a row before it
    cause: str
    passed_over: tuple[tuple[int, int], ...] = ()  # epoch and batch of those that are left out from now on
    rewound: bool = True  # whether the data went back too; else it goes on from where it was


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChanged:
    """The run goes on in a wider format."""

    step: int
    before: str
    after: str
    modules: tuple[str, ...] = ()  # those it was changed for; none: all of them
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClimbedBack:
    """After a healthy stretch the run has the precision again that it had before."""

    step: int
    before: str
    after: str
    healthy_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStopped:
    """Nothing on the ladder helped."""

    step: int
    cause: str
    tried: tuple[str, ...]  # the rungs, in their order
    capsule: str = ""  # where the bad step was saved
    build: str = ""  # the function that makes its model, as --build takes it
    checkpoint: str = ""  # the newest good one


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """A finite loss far above its usual noise."""

    step: int
    loss: float
    usual: float  # the median before
    spreads: float
    action: Literal["none", "rollback"] = "none"


# Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on."""

    step: int
    directory: str
    error: str
    kind: Literal["full", "read-only", "permission", "other"]
    failures_in_a_row: int = 1
    last: str = ""  # the newest whole one


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLate:
    """A checkpoint takes longer to write than there is time between two of them."""

    step: int
    seconds: float  # that it has taken, or is taking so far
    every: float  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A checkpoint that was not used, because it is not what was written."""

    path: str
    why: str
    instead: str = ""  # the older one that was used


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNotFinite:
    """Weights or optimizer state with inf or NaN in them, which would have been saved."""

    step: int
    names: tuple[str, ...]  # some of them
    count: int  # all
    where: Literal["snapshot", "checkpoint"]


# The machine


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A step did not fit into memory."""

    step: int
    pieces: int  # that its batch is split into from now on
    error: str
    splits: bool  # whether that is allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The run was told to end."""

    step: int
    signal: str
    checkpoint: str = ""
    seconds: float = 0.0  # from the signal until the checkpoint was whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """Another rank died or hangs."""

    step: int
    waited: float  # seconds; 0 where it was not waited for, as its connection was closed
    error: str
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksChanged:
    """A run goes on with another number of ranks."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockTakenOver:
    """The lock of a run that is no more was in the folder."""

    pid: int
    host: str
    since: str


Fault = (
    StepSkipped
    | ScaleAtFloor
    | RolledBack
    | PrecisionChanged
    | ClimbedBack
    | TrainingStopped
    | LossSpike
    | CheckpointFailed
    | CheckpointLate
    | CheckpointDamaged
    | WeightsNotFinite
    | OutOfMemory
    | Preempted
    | RankLost
    | RanksChanged
    | LockTakenOver
)

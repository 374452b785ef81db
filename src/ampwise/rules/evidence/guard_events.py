"""Events of a guarded run: what happened, and what the guard did about it.

The fields hold what the guard knows; the rules in ``rules/run`` turn them into sentences. An unknown text is empty.
Steps are counted as in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CheckpointDamaged",
    "CheckpointFailed",
    "CheckpointLate",
    "GuardEvent",
    "LockTakenOver",
    "LossSpike",
    "PrecisionChanged",
    "PrecisionRestored",
    "Preempted",
    "RankLost",
    "RanksChanged",
    "RolledBack",
    "ScaleAtFloor",
    "StepOutOfMemory",
    "StepSkipped",
    "TrainingStopped",
    "WeightsNotFinite",
]


# Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """A skipped step that was not an ordinary overflow of scaled gradients."""

    step: int
    loss: float | None
    scale: float | None  # loss scale; None without scaling
    streak: int  # bad steps in a row, this one included
    scaled: bool  # whether a scaler is in use, so a lower scale may still help


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAtFloor:
    """Gradients overflow at the lowest loss scale allowed."""

    step: int
    scale: float
    streak: int  # bad steps in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The state of an earlier step was restored."""

    step: int  # at which the rollback was decided
    to_step: int
    source: Literal["memory", "disk"]
    milliseconds: float
    streak: int  # bad steps in a row before it
    cause: str
    passed_over: tuple[tuple[int, int], ...] = ()  # epoch and index of batches to skip from now on
    rewound: bool = True  # whether the data was rewound too; else it continues from its position


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChanged:
    """The run switched to a wider format."""

    step: int
    before: str
    after: str
    modules: tuple[str, ...] = ()  # affected modules; empty: all of them
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRestored:
    """The run returned to its previous precision after a healthy period."""

    step: int
    before: str
    after: str
    healthy_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStopped:
    """No recovery helped, and training was stopped."""

    step: int
    cause: str
    tried: tuple[str, ...]  # the recoveries tried, in order
    capsule: str = ""  # path of the saved bad step
    build: str = ""  # the function that builds its model, for --build
    checkpoint: str = ""  # path of the newest good checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """A finite loss far above its usual noise."""

    step: int
    loss: float
    usual: float  # the median of the steps before
    spreads: float
    action: Literal["none", "rollback"] = "none"


# Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A checkpoint could not be written; training continues."""

    step: int
    directory: str
    error: str
    kind: Literal["full", "read-only", "permission", "other"]
    failures_in_a_row: int = 1
    last: str = ""  # path of the newest complete checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLate:
    """A checkpoint takes longer to write than the checkpoint interval."""

    step: int
    seconds: float  # duration, so far
    every: float  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A checkpoint that was not used because its contents are damaged."""

    path: str
    why: str
    instead: str = ""  # path of the older checkpoint that was used


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNotFinite:
    """Weights or optimizer state that contain inf or NaN and would have been saved."""

    step: int
    names: tuple[str, ...]  # some of them
    count: int  # all
    where: Literal["snapshot", "checkpoint"]


# The machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutOfMemory:
    """A step ran out of memory."""

    step: int
    pieces: int  # that its batch is now split into
    error: str
    splits: bool  # whether splitting is allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The run was ended by a signal."""

    step: int
    signal: str
    checkpoint: str = ""
    seconds: float = 0.0  # from the signal until the checkpoint was complete


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """Another rank died or hangs."""

    step: int
    waited: float  # seconds; 0 if its connection was closed
    error: str
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksChanged:
    """The run was resumed with a different number of ranks."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockTakenOver:
    """The folder held a stale lock of a run that has ended."""

    pid: int
    host: str
    since: str


GuardEvent = (
    StepSkipped
    | ScaleAtFloor
    | RolledBack
    | PrecisionChanged
    | PrecisionRestored
    | TrainingStopped
    | LossSpike
    | CheckpointFailed
    | CheckpointLate
    | CheckpointDamaged
    | WeightsNotFinite
    | StepOutOfMemory
    | Preempted
    | RankLost
    | RanksChanged
    | LockTakenOver
)

"""Events of a guarded run: what happened, what the guard did about it, and the line that says so.

Each event has a stable name, a level, a message of one line, and advice where there is something to do. What a user
must act on is also a finding: the rules in ``rules/amp8xx_guard`` take some of these events. An unknown text is empty;
steps are counted as in the engine.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from ampwise.guard.stopping import STOPPED_EXIT_CODE
from ampwise.numbers.number_text import number_text, scale_text
from ampwise.runs.events import Level, LoggedEvent

NAMED = 3  # names listed in full
NAMED_BATCHES = 5
LONGEST = 300  # characters of an external text


@dataclass(frozen=True, kw_only=True)
class GuardEvent:
    """Something that happened in a guarded run."""

    name: ClassVar[str]
    level: ClassVar[Level]
    static_advice: ClassVar[str] = ""  # for ``advice``, where it does not depend on what happened

    step: int | None = None

    def __init_subclass__(cls, *, name: str, level: Level) -> None:
        cls.name, cls.level = name, level

    @property
    def message(self) -> str:
        """What happened, in one line."""
        raise NotImplementedError

    @property
    def advice(self) -> str:
        """What to do about it, in sentences; empty if nothing."""
        return self.static_advice

    @property
    def fields(self) -> dict[str, Any]:
        """All known numbers and texts except the step."""
        return {name: value for name, value in asdict(self).items() if name != "step" and value not in (None, "", ())}

    def logged(self) -> LoggedEvent:
        """Return the event as plain data, for a record."""
        parts = ("name", "level", "message", "step", "advice", "fields")
        return LoggedEvent(**{part: getattr(self, part) for part in parts})

    def as_dict(self) -> dict[str, Any]:
        """Return the event as valid JSON data, for an alert: name, level, message, step, advice, fields."""
        return self.logged().as_dict()


# Recovery


@dataclass(frozen=True, kw_only=True)
class StepSkipped(GuardEvent, name="step-skipped", level="info"):
    """A skipped step that was not an ordinary overflow of scaled gradients.

    A NaN in the gradients makes every weight NaN in one update, so the update is skipped, in any precision. Overflows
    while a scaler searches for its scale are normal and not reported.
    """

    step: int
    loss: float | None
    scale: float | None  # loss scale; None without scaling
    streak: int  # bad steps in a row, this one included
    scaled: bool  # whether a scaler is in use, so a lower scale may still help

    @property
    def message(self) -> str:
        if self.loss is not None and not math.isfinite(self.loss):
            bad = f"its loss was {number_text(self.loss)}"
        else:
            at_scale = f" at a loss scale of {scale_text(self.scale)}" if self.scaled and self.scale else ""
            loss = "" if self.loss is None else f", with a loss of {number_text(self.loss)}"
            bad = f"its gradients were not finite{at_scale}{loss}"
        return f"the step was skipped: {bad}{_streak(self.streak, 'bad step')}; the weights are unchanged"


@dataclass(frozen=True, kw_only=True)
class ScaleAtFloor(GuardEvent, name="scale-at-floor", level="warning"):
    """Gradients overflow at the lowest loss scale allowed: the scale is not the cause."""

    static_advice = (
        "See the finding that reports the operation (AMP9...). If the model keeps overflowing in FP16, train it in "
        "BF16, or keep the operation in FP32."
    )

    step: int
    scale: float
    streak: int  # bad steps in a row

    @property
    def message(self) -> str:
        steps = "a step" if self.streak == 1 else f"{_steps(self.streak)} in a row"
        limit = f"the loss scale at its lower limit of {scale_text(self.scale)}"
        return f"{steps} overflowed with {limit}: a lower scale will not help"


@dataclass(frozen=True, kw_only=True)
class RolledBack(GuardEvent, name="rolled-back", level="warning"):
    """The state of an earlier step was restored; bad batches are skipped from now on, also after a later resume."""

    static_advice = (
        "Inspect the reported batches: the data may be bad. If the run keeps rolling back, lower the learning rate "
        "or clip gradients harder."
    )

    step: int  # at which the rollback was decided
    to_step: int
    source: Literal["memory", "disk"]
    milliseconds: float
    streak: int  # bad steps in a row before it
    cause: str
    passed_over: tuple[tuple[int, int], ...] = ()  # epoch and index of batches to skip from now on
    rewound: bool = True  # whether the data was rewound too; else it continues from its position

    @property
    def message(self) -> str:
        data = "the data was rewound too" if self.rewound else "the data continues from its current position"
        if self.passed_over:
            by_epoch: dict[int, list[str]] = {}
            for epoch, batch in self.passed_over[:NAMED_BATCHES]:
                by_epoch.setdefault(epoch, []).append(str(batch))
            named = ", ".join(
                f"batch{'es' if len(batches) > 1 else ''} {', '.join(batches)} of epoch {epoch}"
                for epoch, batches in by_epoch.items()
            )
            more = len(self.passed_over) - NAMED_BATCHES
            data += f", and {named}{f' and {more:,} more' if more > 0 else ''}, counted from 0, will be skipped"
        return (
            f"rolled back {_steps(self.step - self.to_step)}, to step {self.to_step:,}, from {self.source} in "
            f"{_time(self.milliseconds / 1e3)}, because {_one_line(self.cause)}; {data}"
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionChanged(GuardEvent, name="precision-changed", level="warning"):
    """The run switched to a wider format, because neither skipping, nor a lower scale, nor rolling back helped.

    Step times before and after are not comparable, and accuracy hardly is.
    """

    static_advice = "Use this precision from the start, so that the next run loses no steps."

    step: int
    before: str
    after: str
    modules: tuple[str, ...] = ()  # affected modules; empty: all of them
    cause: str = ""

    @property
    def message(self) -> str:
        only = f" for {_names(self.modules)} only" if self.modules else ""
        cause = f", because {_one_line(self.cause)}" if self.cause else ""
        return f"the precision was changed from {_one_line(self.before)} to {_one_line(self.after)}{only}{cause}"


@dataclass(frozen=True, kw_only=True)
class PrecisionRestored(GuardEvent, name="climbed-back", level="info"):
    """The run returned to its previous precision after a healthy period."""

    step: int
    before: str
    after: str
    healthy_steps: int

    @property
    def message(self) -> str:
        return (
            f"back from {_one_line(self.before)} to {_one_line(self.after)}, after {_steps(self.healthy_steps)} "
            "without failures"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingStopped(GuardEvent, name="training-stopped", level="error"):
    """No recovery helped, and training was stopped."""

    step: int
    cause: str
    tried: tuple[str, ...]  # the recoveries tried, in order
    capsule: str = ""  # path of the saved bad step
    build: str = ""  # the function that builds its model, for `ampwise replay`
    checkpoint: str = ""  # path of the newest good checkpoint
    not_widened: str = ""  # why a wider precision was not tried
    exit_code: int = STOPPED_EXIT_CODE

    @property
    def message(self) -> str:
        rungs = ", ".join(map(_one_line, self.tried))
        tried = f"tried without success: {rungs}" if rungs else "nothing else is allowed"
        kept = f"; the guard cannot change the precision: {_one_line(self.not_widened)}" if self.not_widened else ""
        return f"training was stopped: {_one_line(self.cause)}; {tried}{kept}"

    @property
    def advice(self) -> str:
        look, from_where = "", "it starts over, because there is no good checkpoint"
        if self.capsule:
            command = f"ampwise replay {shlex.quote(self.capsule)}"
            if self.build:
                look = f"Replay the bad step: `{command} {shlex.quote(self.build)}`. "
            else:
                look = (
                    f"Replay the bad step: `{command} train.py:make`, replacing train.py:make with your function that "
                    "builds the model. "
                )
        if self.checkpoint:
            from_where = f"it continues from {_one_line(self.checkpoint)}"
        return f"{look}Fix the cause, then start the same command again: {from_where}."


@dataclass(frozen=True, kw_only=True)
class LossSpike(GuardEvent, name="loss-spike", level="warning"):
    """A finite loss far above its usual noise."""

    step: int
    loss: float
    usual: float  # the median of the steps before
    spreads: float
    action: Literal["none", "rollback"] = "none"

    @property
    def message(self) -> str:
        rolls_back = "; the run rolls back to its last good state" if self.action == "rollback" else ""
        return (
            f"the loss jumped to {number_text(self.loss)} from a usual {number_text(self.usual)}, {self.spreads:.0f} "
            f"times its usual spread{rolls_back}"
        )

    @property
    def advice(self) -> str:
        if self.action == "rollback":
            return "Inspect the batches that are now skipped. If it recurs, clip gradients or lower the learning rate."
        return (
            "Inspect the batch of that step; clip gradients, lower the learning rate, or go back to an earlier "
            "checkpoint."
        )


# Checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(GuardEvent, name="checkpoint-failed", level="error"):
    """A checkpoint could not be written; training continues."""

    step: int
    directory: str
    error: str
    kind: Literal["full", "read-only", "permission", "other"]
    failures_in_a_row: int = 1
    last: str = ""  # path of the newest complete checkpoint

    @property
    def message(self) -> str:
        known = {
            "full": "the disk is full",
            "read-only": "the disk is read-only",
            "permission": "the run has no write permission there",
        }
        error = _one_line(self.error)
        what = f"{known[self.kind]} ({error})" if self.kind in known else error
        last = f"the last complete one is {_one_line(self.last)}" if self.last else "there is no complete one yet"
        return (
            f"no checkpoint could be written to {_one_line(self.directory)}: {what}"
            f"{_streak(self.failures_in_a_row, 'failure')}; {last}; training continues"
        )

    @property
    def advice(self) -> str:
        return {
            "full": "Free space on that disk: the run continues, and retries when the next checkpoint is due.",
            "read-only": "Remount it for writing; a disk that turns read-only by itself is often failing.",
            "permission": "Restore write permission there for the user of the run.",
            "other": "Fix the reported problem while the run continues; writing is retried when the next checkpoint is "
            "due.",
        }[self.kind]


@dataclass(frozen=True, kw_only=True)
class CheckpointLate(GuardEvent, name="checkpoint-late", level="warning"):
    """A checkpoint takes longer to write than the checkpoint interval; training does not wait for it."""

    static_advice = "Write to a faster disk, or save checkpoints less often."

    step: int
    seconds: float  # duration, so far
    every: float  # seconds

    @property
    def message(self) -> str:
        return f"a checkpoint has been in progress for {_time(self.seconds)}, but one is due every {_time(self.every)}"


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(GuardEvent, name="checkpoint-damaged", level="warning"):
    """A checkpoint that was not used because its contents are damaged."""

    static_advice = "Check the disk, and whatever copied the folder. The damaged checkpoint is left in place."

    path: str
    why: str
    instead: str = ""  # path of the older checkpoint that was used

    @property
    def message(self) -> str:
        instead = f"{_one_line(self.instead)} is used instead" if self.instead else "there is no other complete one"
        return f"the checkpoint is damaged: {_one_line(self.why)}; {instead}"


@dataclass(frozen=True, kw_only=True)
class WeightsNotFinite(GuardEvent, name="weights-not-finite", level="error"):
    """Weights or optimizer state that contain inf or NaN and would have been saved."""

    static_advice = (
        "If the loss is not finite either, the guard rolls back to the last good state. Lower the learning rate, "
        "and check what else writes to the reported tensors; a single huge batch can corrupt BatchNorm statistics."
    )

    step: int
    names: tuple[str, ...]  # some of them
    count: int  # all
    where: Literal["snapshot", "checkpoint"]

    @property
    def message(self) -> str:
        tensors = "1 tensor is" if self.count == 1 else f"{self.count:,} tensors are"
        which = f": {_names(self.names, self.count)}" if self.names else ""
        return f"{tensors} not finite, so the {self.where} was discarded{which}"


# The machine


@dataclass(frozen=True, kw_only=True)
class StepOutOfMemory(GuardEvent, name="out-of-memory", level="warning"):
    """A step ran out of memory; if splitting is allowed, its batch is run in pieces whose gradients are summed."""

    static_advice = (
        "Use a smaller batch with accumulation, or activation checkpointing; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragmentation."
    )

    step: int
    pieces: int  # that its batch is now split into
    error: str
    splits: bool  # whether splitting is allowed

    @property
    def message(self) -> str:
        if self.splits:
            then = f"training continues with each batch in {self.pieces:,} pieces and the same effective batch size"
        else:
            then = "splitting the batch is not allowed, so the step was not taken"
        return f"the step ran out of memory; {then} ({_one_line(self.error)})"


@dataclass(frozen=True, kw_only=True)
class Preempted(GuardEvent, name="preempted", level="info"):
    """A signal ended the run: it finished its step, saved a checkpoint and exited."""

    step: int
    signal: str
    checkpoint: str = ""
    seconds: float = 0.0  # from the signal until the checkpoint was complete

    @property
    def message(self) -> str:
        if self.checkpoint:
            saved = f"{_one_line(self.checkpoint)} was complete {_time(self.seconds)} later"
        else:
            saved = "no checkpoint could be saved"
        return f"ended by {_one_line(self.signal)} after this step; {saved}"

    @property
    def advice(self) -> str:
        if self.checkpoint:
            return "Start the same command again: it continues from there."
        return "Start the same command again: it continues from the newest complete checkpoint, which is older."


@dataclass(frozen=True, kw_only=True)
class RankLost(GuardEvent, name="rank-lost", level="error"):
    """Another rank died or hangs."""

    static_advice = (
        "Check the output of the other ranks: the first one to fail shows the cause. Then start the same command again."
    )

    step: int
    waited: float  # seconds; 0 if its connection was closed
    error: str
    checkpoint: str = ""

    @property
    def message(self) -> str:
        how = f"a rank did not answer within {_time(self.waited)}" if self.waited else "a rank is gone"
        if self.checkpoint:
            last = f"the last complete checkpoint is {_one_line(self.checkpoint)}"
        else:
            last = "there is no complete checkpoint yet"
        return f"{how}, so this one stops ({_one_line(self.error)}); {last}"


@dataclass(frozen=True, kw_only=True)
class RanksChanged(GuardEvent, name="ranks-changed", level="info"):
    """The run was resumed with a different number of ranks.

    Weights and optimizer state are resharded and unchanged. Random numbers and the position in the data are per rank:
    the run is not bitwise identical to an uninterrupted one.
    """

    static_advice = (
        "Keep the effective batch size: change the per-rank batch size or the accumulation by the same factor."
    )

    before: int
    after: int

    @property
    def message(self) -> str:
        before, after = ("1 rank" if count == 1 else f"{count:,} ranks" for count in (self.before, self.after))
        return (
            f"saved with {before}, resumed with {after}: the effective batch size is {self.after / self.before:.3g} "
            "times the previous one, unless the per-rank batch size changed too; each rank gets new random numbers and "
            "restarts the epoch's data"
        )


@dataclass(frozen=True, kw_only=True)
class LockTakenOver(GuardEvent, name="lock-taken-over", level="info"):
    """The folder held a stale lock of a run that has ended."""

    pid: int
    host: str
    since: str

    @property
    def message(self) -> str:
        since = f" since {_one_line(self.since)}" if self.since else ""
        return (
            f"the folder was locked{since} by process {self.pid} on {_one_line(self.host)}, which no longer exists; "
            "this run now holds the lock"
        )


# Texts


def _one_line(text: str) -> str:
    """Return an external text, such as an error message, on one line of limited length.

    >>> _one_line("  no space\\n left on device ")
    'no space left on device'
    """
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _steps(count: int) -> str:
    """
    >>> _steps(1), _steps(1200)
    ('1 step', '1,200 steps')
    """
    return "1 step" if count == 1 else f"{count:,} steps"


def _streak(count: int, what: str) -> str:
    """Return the text for a repeated failure; empty for the first.

    >>> _streak(1, "failure"), _streak(2, "failure"), _streak(13, "bad step")
    ('', ', the 2nd failure in a row', ', the 13th bad step in a row')
    """
    if count < 2:
        return ""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f", the {count:,}{ending} {what} in a row"


def _time(seconds: float) -> str:
    """
    >>> _time(0.0042), _time(0.25), _time(3.04), _time(90), _time(7260)
    ('4.2 ms', '250 ms', '3.0 s', '1.5 min', '2.0 h')
    """
    if seconds < 0.9995:  # 1e+03 ms otherwise
        return f"{seconds * 1e3:.3g} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _names(names: Iterable[str], count: int | None = None) -> str:
    """Return the first few names in backquotes, and how many more there are.

    >>> _names(["a", "b"]), _names("abcde"), _names(["head"], count=9)
    ('`a` and `b`', '`a`, `b`, `c` and 2 more', '`head` and 8 more')
    """
    given = list(names)
    shown = [f"`{_one_line(name)}`" for name in given[:NAMED]]
    more = max(count or 0, len(given)) - len(shown)
    parts = [*shown, *([f"{more:,} more"] if more else [])]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

"""When to save the state, in memory and on disk, writing it in the background, and when it is known to be good."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import platform
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.version import installed_version
from ampwise.guard.disk.catalog import SavedCheckpoint, checkpoints, mark_bad, mark_good, prune
from ampwise.guard.events import CheckpointFailed, CheckpointLate, WeightsNotFinite
from ampwise.guard.rank_agreement import AgreedStep, RankAgreement
from ampwise.guard.reporter import EventReporter
from ampwise.guard.snapshots import MemorySnapshot, MemorySnapshots
from ampwise.guard.state import LiveState, TrainingState
from ampwise.guard.training import GuardedTraining
from ampwise.runs.plain_data import to_json

NAMED = 5  # tensors named in a finding
LATE_S = 1.0  # a delay that is not reported
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
ERRORS: dict[int | None, Literal["full", "read-only", "permission"]] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read-only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}


class Interval(NamedTuple):
    """Interval in seconds or in steps; the other is None."""

    seconds: float | None
    steps: int | None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} s"

    @classmethod
    def checked(cls, given: Any) -> Interval:
        """Parse an interval.

        >>> Interval.checked("10min"), Interval.checked("500 steps")
        (Interval(seconds=600.0, steps=None), Interval(seconds=None, steps=500))
        """
        found = DURATION.fullmatch(given) if isinstance(given, str) else None
        if found is not None and found[2] in ("step", "steps"):
            if not found[1].isdigit() or int(found[1]) < 1:
                raise BadInput(f"Guard(every={given!r}): expected a whole number of steps, 1 or more.")
            return cls(None, int(found[1]))
        return cls(seconds(given, "every"), None)


def seconds(given: Any, name: str) -> float:
    """Return the seconds of a duration, which is a number or a number with a unit."""
    number = math.nan
    if isinstance(given, int | float) and not isinstance(given, bool):
        number = float(given)
    elif isinstance(given, str) and (found := DURATION.fullmatch(given)) and found[2] in UNITS:
        number = float(found[1]) * UNITS[found[2]]
    if not 0 < number < math.inf:
        raise BadInput(f"Guard({name}={given!r}): expected a duration such as '10min', '90s', '2h'.")
    return number


def non_finite_tensors(values: Mapping[str, Tensor], buffers: Collection[str]) -> list[str]:
    """Return the names of model tensors with inf or NaN. Buffers such as masks may have inf; running statistics not."""
    found = []
    for name, value in values.items():
        is_checked = value.is_floating_point() or value.is_complex()
        if not name.startswith("model.") or not is_checked or value.itemsize == 1:
            continue
        may_be_infinite = name in buffers and not name.endswith((".running_mean", ".running_var"))
        if value.isnan().any() if may_be_infinite else not value.isfinite().all():
            found.append(name)
    return found


# --- the background ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SaveJob:
    """A checkpoint to write, and the result."""

    snapshot: MemorySnapshot
    live: LiveState | None = None  # used only for shapes and shards
    plain: Any = None  # this rank's plain state, as JSON
    about: Mapping[str, Any] = field(default_factory=dict)
    spared: frozenset[Path] = frozenset()  # checkpoints that must not be pruned
    began: float = field(default_factory=time.monotonic)
    checkpoint: SavedCheckpoint | None = None
    error: Exception | None = None
    bad_tensors: list[str] = field(default_factory=list)  # with inf or NaN, on any rank; then nothing is written
    undone_to: int | None = None  # the run went back to this earlier step in the meantime


class BackgroundSaver:
    """Writes checkpoints in a background thread, one at a time, and marks good ones; errors are not raised there."""

    def __init__(self, directory: Path, keep: int, agreement: RankAgreement, log: Callable[[str], None]) -> None:
        self._directory, self._keep, self._log = directory, keep, log
        self._group, self._is_first = agreement.saving, agreement.rank == 0
        self._thread: threading.Thread | None = None
        self._to_mark: deque[SavedCheckpoint] = deque()
        self._marking = threading.Lock()
        self.job: SaveJob | None = None  # being written, or written and not collected yet

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, job: SaveJob) -> None:
        """Start writing; all ranks call this at the same step, when none is busy."""
        job.snapshot.held = True
        self.job = job
        self._thread = threading.Thread(target=self._write, args=(job,), name="ampwise-guard-save", daemon=True)
        self._thread.start()

    def finished(self, *, wait: bool) -> SaveJob | None:
        """Return the job that has finished or failed, once; None if there is none."""
        if wait and self._thread is not None:
            self._thread.join()
        if self._thread is None or self._thread.is_alive():
            return None
        job, self.job, self._thread = self.job, None, None
        return job

    def _write(self, job: SaveJob) -> None:
        from ampwise.guard.disk.writing import write_checkpoint

        assert job.live is not None
        try:
            job.snapshot.wait()
            staged = {name: value.cpu() for name, value in job.snapshot.values.items()}
            checked = {name: value for name, value in staged.items() if name not in job.live.transient}
            job.bad_tensors = non_finite_tensors(checked, job.live.moving)
            if self._group is not None:
                everyone: list[Any] = [None] * dist.get_world_size(self._group)
                dist.all_gather_object(everyone, job.bad_tensors, group=self._group)
                job.bad_tensors = sorted({name for found in everyone for name in found})
            if job.bad_tensors:
                return
            job.checkpoint = write_checkpoint(
                self._directory,
                step=job.snapshot.step,
                live=job.live.tensors,
                staged=staged,
                plain=job.plain,
                about=job.about,
                group=self._group,
                alike=set(staged) - job.live.moving,
            )
            if self._is_first:
                self.mark_pending()  # the newest good one is not pruned
                if job.undone_to is not None:
                    mark_undone(job.checkpoint, job.undone_to)
                else:
                    prune(self._directory, self._keep, job.spared)
        except Exception as error:
            job.error = error

    def mark_good(self, checkpoint: SavedCheckpoint) -> None:
        """Mark a checkpoint as good soon, without waiting for the disk."""
        self._to_mark.append(checkpoint)
        with contextlib.suppress(RuntimeError):  # no more threads: it is marked with the next checkpoint, or at the end
            threading.Thread(target=self.mark_pending, name="ampwise-guard-mark", daemon=True).start()

    def mark_pending(self, *, undone_after: int | None = None) -> None:
        """Mark the checkpoints that are to be marked, now; not those of steps that were undone."""
        with self._marking:  # so that nothing is marked as good after it was marked as undone
            while self._to_mark:
                checkpoint = self._to_mark.popleft()
                if undone_after is not None and checkpoint.step > undone_after:
                    continue
                try:
                    mark_good(checkpoint)
                except (OSError, BadInput) as error:
                    self._log(f"{checkpoint.path} cannot be marked as good: {error}")


def mark_undone(checkpoint: SavedCheckpoint, step: int) -> None:
    """Mark a checkpoint as undone: the run went back to an earlier step."""
    mark_bad(checkpoint, f"the run was rolled back to step {step:,}", undone=True)


# --- when ----------------------------------------------------------------------------------------------------------


class GuardedRun(NamedTuple):
    """What all parts of a guard work on."""

    directory: Path
    engine: GuardedTraining
    state: TrainingState
    agreement: RankAgreement
    reporter: EventReporter


class Checkpointing:
    """Takes snapshots and checkpoints when they are due, and marks them good after enough healthy steps."""

    def __init__(
        self,
        run: GuardedRun,
        *,
        every: Interval,
        keep: int,
        snapshot_every: int,
        snapshots_on: str,
        extra_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._directory, self._engine, self._training_state, self._agreement, self._reporter = run
        self._every, self._snapshot_every, self._extra_state = every, snapshot_every, extra_state
        self.snapshots = MemorySnapshots(run.engine.device, snapshots_on)
        self.saver = BackgroundSaver(run.directory, keep, run.agreement, run.reporter.log)
        self._written: list[SaveJob] = []  # checkpoints that are not known to be good yet
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._late_reported: SaveJob | None = None
        self._wanted: tuple[int, Callable[[int], object]] | None = None  # the last step, and how to save it
        self.failures = 0  # in a row
        self.last: SavedCheckpoint | None = None
        self.last_good: SavedCheckpoint | None = None

    # Saving

    def begin(self, step: int, resumed: SavedCheckpoint | None) -> None:
        """Take the first snapshot, and trust it: there is no other."""
        first, _ = self._take(step)
        to_json(first.plain, "the state")  # refuses state that cannot be saved, now and not in an hour
        self.snapshots.promote(first)
        self._saved_at = time.monotonic()
        self.last = resumed
        if resumed is not None:
            self._saved_step = step
            self.last_good = resumed if resumed.good else None
            if not resumed.good:  # it may become good
                self._written = [SaveJob(first, checkpoint=resumed)]

    def _take(self, step: int) -> tuple[MemorySnapshot, LiveState]:
        for unneeded in self.snapshots.candidates[1:-1]:  # the oldest is the next to become good
            self.snapshots.drop(unneeded)
        live = self._training_state.live()
        live.plain.update(self._extra_state())
        return self.snapshots.take(step, live), live

    def data_begins(self, position: Any) -> None:
        """Set the data's start position in snapshots taken before there was any data."""
        for taken in self.snapshots.kept:
            taken.plain["data"] = position if taken.plain.get("data") is None else taken.plain["data"]

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, by steps or by this rank's monotonic clock."""
        if self._every.steps is not None:
            return step - max(self._saved_step, 0) >= self._every.steps
        return time.monotonic() - self._saved_at >= (self._every.seconds or 0.0)

    def after(self, step: int, agreed: AgreedStep) -> None:
        """After a good step: schedule a checkpoint or snapshot, to be taken once user code after the step has run."""
        if agreed.due and not agreed.busy:
            self._wanted = step, self._save
        elif not agreed.due:
            if step % self._snapshot_every == 0:
                self._wanted = step, self._take
        elif (job := self.saver.job) is not None and job is not self._late_reported:
            now = time.monotonic()
            if now - job.began > LATE_S:
                self._late_reported = job
                every = self._every.seconds or now - self._saved_at
                self._reporter.report(CheckpointLate(step=step, seconds=now - job.began, every=every))

    def keep_wanted(self) -> None:
        """Save what is scheduled, before the next batch is fetched: user code may have updated weight averages."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            step, keep = wanted
            try:
                keep(step)
            except (torch.OutOfMemoryError, MemoryError) as error:  # only for the copy: training has its memory
                self._report_failed(step, error)

    def _save(self, step: int) -> None:
        self._saved_at, self._saved_step = time.monotonic(), step
        taken, live = self._take(step)
        about = {  # which ``ampwise checkpoints -v`` prints
            "precision": self._engine.precision,
            "policy": self._engine.policy.as_dict(),
            "ampwise": installed_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "command": [str(part) for part in sys.argv][:100],
            "folder": os.getcwd(),  # noqa: PTH109 (as text)
        }
        next_good = self._written[0].checkpoint if self._written else None
        spared = frozenset() if next_good is None else frozenset({next_good.path})
        self.saver.begin(SaveJob(taken, live, to_json(taken.plain, "the state"), about, spared))

    def save_now(self, step: int) -> SavedCheckpoint | None:
        """Write a checkpoint and wait for it; None if it could not be written, which is reported."""
        self._wanted = None
        self.collect(wait=True)
        if self._agreement.broadcast(self._saved_step == step and self._is_last(step)):
            return self.last
        self._save(step)
        self.collect(wait=True)
        return self.last if self._is_last(step) else None

    def _is_last(self, step: int) -> bool:
        return self.last is not None and self.last.step == step

    # Results

    def collect(self, *, wait: bool = False) -> None:
        """Handle the result of a checkpoint that has been written or has failed."""
        job = self.saver.finished(wait=wait)
        if job is not None:
            self.snapshots.release(job.snapshot)
            job.live = job.plain = None  # free memory
            step = job.snapshot.step
            if job.checkpoint is None:
                self.failures += 1
                if not job.bad_tensors:
                    self._report_failed(step, job.error or RuntimeError("nothing was written"))
                else:
                    bad, names = len(job.bad_tensors), tuple(job.bad_tensors[:NAMED])
                    self._reporter.report(WeightsNotFinite(step=step, names=names, count=bad, where="checkpoint"))
                    if not job.snapshot.good:
                        self.snapshots.drop(job.snapshot)
            elif job.undone_to is not None:
                self.failures = 0
                self._undo(job.checkpoint, job.undone_to)
            else:
                self.failures = 0
                self.last = job.checkpoint
                self._written = [*self._written[:1], job]  # the oldest is the next to become good
        if wait:
            self.saver.mark_pending()

    def _report_failed(self, step: int, error: Exception) -> None:
        kind: Literal["full", "read-only", "permission", "other"] = "other"
        cause: BaseException | None = error
        while cause is not None and kind == "other":
            if isinstance(cause, OSError):
                kind = ERRORS.get(cause.errno, "other")
            cause = cause.__cause__ or cause.__context__
        self._reporter.report(
            CheckpointFailed(
                step=step,
                directory=str(self._directory),
                error=str(error) or type(error).__name__,
                kind=kind,
                failures_in_a_row=self.failures,
                last="" if self.last is None else str(self.last.path),
            )
        )

    def trust(self, number: int, healthy: int) -> None:
        """Mark as good everything saved before the last ``healthy`` healthy steps in a row, which end at ``number``."""
        for taken in self.snapshots.candidates:
            if taken.step <= number - healthy:
                self.snapshots.promote(taken)
        for job in [each for each in self._written if each.snapshot.step <= number - healthy]:
            self._written.remove(job)
            if job.checkpoint is not None and self._agreement.rank == 0:
                self.saver.mark_good(job.checkpoint)
                self.last_good = dataclasses.replace(job.checkpoint, good=True)

    def undo_after(self, step: int) -> None:
        """Discard snapshots and mark checkpoints of steps after this one: the run has gone back."""
        self._wanted = None
        self.snapshots.drop_after(step)
        job = self.saver.job
        if job is not None and job.snapshot.step > step:
            job.undone_to = step
        self.saver.mark_pending(undone_after=step)
        self._written = [each for each in self._written if each.snapshot.step <= step]
        self._saved_step = min(self._saved_step, step)
        found: list[SavedCheckpoint] = []
        if self._agreement.rank == 0:
            try:
                found = checkpoints(self._directory)
            except BadInput as error:  # the directory cannot be listed
                self._reporter.log(str(error))
        whole = [checkpoint for checkpoint in found if not checkpoint.trouble]
        for checkpoint in whole:
            if checkpoint.step > step:
                self._undo(checkpoint, step)
        self.last = self._agreement.broadcast(next((each for each in whole if each.step <= step), None))

    def _undo(self, checkpoint: SavedCheckpoint, step: int) -> None:
        if self._agreement.rank == 0:
            try:
                mark_undone(checkpoint, step)
            except (OSError, BadInput) as error:
                self._reporter.log(f"{checkpoint.path} cannot be marked as undone: {error}")

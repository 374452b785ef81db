"""When to save the state, in memory and on disk, and when a saved state is known to be good."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ampwise.errors import BadInput
from ampwise.finding.version import installed_version
from ampwise.guard.background_saver import BackgroundSaver, SaveJob, mark_undone, write_error_kind
from ampwise.guard.disk.catalog import SavedCheckpoint, checkpoints, mark_good
from ampwise.guard.durations import Interval
from ampwise.guard.events import CheckpointFailed, CheckpointLate, WeightsNotFinite
from ampwise.guard.exact_json import to_json
from ampwise.guard.rank_agreement import AgreedStep, RankAgreement
from ampwise.guard.reporter import EventReporter
from ampwise.guard.snapshots import MemorySnapshot, MemorySnapshots
from ampwise.guard.state import TrainingState
from ampwise.train.engine import Engine

__all__ = ["CheckpointManager"]

NAMED = 5  # tensors named in a finding
LATE_S = 1.0  # a delay that is not reported


class CheckpointManager:
    """Takes snapshots and checkpoints when they are due, and marks them good after enough healthy steps."""

    def __init__(
        self,
        directory: Path,
        engine: Engine,
        training_state: TrainingState,
        agreement: RankAgreement,
        reporter: EventReporter,
        *,
        every: Interval,
        keep: int,
        snapshot_every: int,
        snapshots_on: str,
        extra_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._directory, self._engine, self._training_state = directory, engine, training_state
        self._agreement, self._reporter, self._every = agreement, reporter, every
        self._snapshot_every, self._extra_state = snapshot_every, extra_state
        self.snapshots = MemorySnapshots(engine.device, snapshots_on)
        self._saver = BackgroundSaver(directory, keep, agreement.saving, prunes=agreement.rank == 0)
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
        to_json(self._take(step).plain, "the state")  # refuses state that cannot be saved, now and not in an hour
        self.snapshots.promote(self.snapshots.candidates[-1])
        self._saved_at = time.monotonic()
        self.last = resumed
        if resumed is not None:
            self._saved_step = step
            self.last_good = resumed if resumed.good else None
            if not resumed.good:  # it may become good
                self._written = [SaveJob(self.snapshots.kept[-1], {}, frozenset(), None, {}, checkpoint=resumed)]

    def _take(self, step: int) -> MemorySnapshot:
        for unneeded in self.snapshots.candidates[1:-1]:  # the oldest is the next to become good
            self.snapshots.drop(unneeded)
        live = self._training_state.live()
        live.plain.update(self._extra_state())
        self._live = live
        return self.snapshots.take(step, live)

    def data_begins(self, position: Any) -> None:
        """Set the data's start position in snapshots taken before there was any data."""
        for taken in self.snapshots.kept:
            taken.plain["data"] = position if taken.plain.get("data") is None else taken.plain["data"]

    def before_update(self) -> None:
        self.snapshots.before_update()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, by steps or by this rank's monotonic clock."""
        if self._every.steps is not None:
            return step - max(self._saved_step, 0) >= self._every.steps
        return time.monotonic() - self._saved_at >= (self._every.seconds or 0.0)

    @property
    def busy(self) -> bool:
        return self._saver.busy

    def after(self, step: int, agreed: AgreedStep) -> None:
        """After a good step: schedule a checkpoint or snapshot, to be taken once user code after the step has run."""
        if agreed.due and agreed.busy:
            self._report_late(step)
        elif agreed.due:
            self._wanted = step, self._save
        elif step % self._snapshot_every == 0:
            self._wanted = step, self._take

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
        taken = self._take(step)
        live, plain = self._live, to_json(taken.plain, "the state")
        next_good = self._written[0].checkpoint if self._written else None
        spared = frozenset() if next_good is None else frozenset({next_good.path})
        self._saver.begin(SaveJob(taken, live.tensors, live.moving, plain, self._about(), live.transient, spared))

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

    def _about(self) -> dict[str, Any]:
        """Return a description of the run, which ``ampwise resume --show`` prints."""
        return {
            "precision": self._engine.precision,
            "policy": self._engine.policy.as_dict(),
            "ampwise": installed_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "command": [str(part) for part in sys.argv][:100],
            "folder": os.getcwd(),  # noqa: PTH109 (as text)
        }

    # Results

    def collect(self, *, wait: bool = False) -> None:
        """Handle the result of a checkpoint that has been written or has failed."""
        job = self._saver.wait() if wait else self._saver.finished()
        if job is None:
            return
        self.snapshots.release(job.snapshot)
        if job.checkpoint is not None:
            self._has_written(job, job.checkpoint)
        else:
            self._has_failed(job)

    def _has_written(self, job: SaveJob, checkpoint: SavedCheckpoint) -> None:
        self.failures = 0
        if job.undone_to is not None:
            self._undo(checkpoint, job.undone_to)
            return
        self.last = checkpoint
        job.live, job.plain = {}, None  # free memory
        self._written = [*self._written[:1], job]  # the oldest is the next to become good

    def _has_failed(self, job: SaveJob) -> None:
        step = job.snapshot.step
        self.failures += 1
        if job.bad_tensors:
            names = tuple(job.bad_tensors[:NAMED])
            self._reporter.report(
                WeightsNotFinite(step=step, names=names, count=len(job.bad_tensors), where="checkpoint")
            )
            if not job.snapshot.good:
                self.snapshots.drop(job.snapshot)
            return
        self._report_failed(step, job.error or RuntimeError("nothing was written"))

    def _report_failed(self, step: int, error: Exception) -> None:
        self._reporter.report(
            CheckpointFailed(
                step=step,
                directory=str(self._directory),
                error=str(error) or type(error).__name__,
                kind=write_error_kind(error),
                failures_in_a_row=self.failures,
                last="" if self.last is None else str(self.last.path),
            )
        )

    def _report_late(self, step: int) -> None:
        job, now = self._saver.job, time.monotonic()
        if job is not None and job is not self._late_reported and now - job.began > LATE_S:
            self._late_reported = job
            every = self._every.seconds or now - self._saved_at
            self._reporter.report(CheckpointLate(step=step, seconds=now - job.began, every=every))

    def trust(self, number: int, healthy: int) -> None:
        """Mark as good everything saved before the last ``healthy`` healthy steps in a row, which end at ``number``."""
        for taken in self.snapshots.candidates:
            if taken.step <= number - healthy:
                self.snapshots.promote(taken)
        for job in [each for each in self._written if each.snapshot.step <= number - healthy]:
            self._written.remove(job)
            if job.checkpoint is not None and self._agreement.rank == 0:
                self._promote(job.checkpoint)

    def _promote(self, checkpoint: SavedCheckpoint) -> None:
        try:
            self.last_good = mark_good(checkpoint)
        except (OSError, BadInput) as error:
            self._reporter.log(f"{checkpoint.path} cannot be marked as good: {error}")

    def undo_after(self, step: int) -> None:
        """Discard snapshots and mark checkpoints of steps after this one: the run has gone back."""
        self._wanted = None
        self.snapshots.drop_after(step)
        job = self._saver.job  # being written, or written and not collected yet
        if job is not None and job.snapshot.step > step:
            job.undone_to = step
        self._written = [each for each in self._written if each.snapshot.step <= step]
        self._saved_step = min(self._saved_step, step)
        self.last = self._agreement.broadcast(self._last_after_undoing(step))

    def _last_after_undoing(self, step: int) -> SavedCheckpoint | None:
        """Mark the checkpoints of later steps, and return the newest remaining one; only rank 0 does this."""
        if self._agreement.rank != 0:
            return None
        try:
            found = checkpoints(self._directory)
        except BadInput as error:  # the directory cannot be listed
            self._reporter.log(str(error))
            return None
        for checkpoint in found:
            if checkpoint.step > step and not checkpoint.trouble:
                self._undo(checkpoint, step)
        return next((each for each in found if each.step <= step and not each.trouble), None)

    def _undo(self, checkpoint: SavedCheckpoint, step: int) -> None:
        if self._agreement.rank == 0:
            try:
                mark_undone(checkpoint, step)
            except (OSError, BadInput) as error:
                self._reporter.log(f"{checkpoint.path} cannot be marked as undone: {error}")

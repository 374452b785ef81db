"""When the state is kept, in memory and on disk, and when it is known to be good."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ampwise.engine.engine import Engine
from ampwise.errors import BadInput
from ampwise.evidence.faults import CheckpointFailed, CheckpointLate, WeightsNotFinite
from ampwise.guard.agreement import Agreed, Agreement
from ampwise.guard.disk.catalog import Checkpoint, checkpoints, promote
from ampwise.guard.durations import Every
from ampwise.guard.plain import to_json
from ampwise.guard.saving import Job, Saver, kind_of, undo
from ampwise.guard.snapshots import Snapshot, Snapshots
from ampwise.guard.state import Whole
from ampwise.guard.telling import Telling
from ampwise.printers.tool import installed_version

__all__ = ["Checkpointing"]

NAMED = 5  # tensors in a finding
LATE_S = 1.0  # a checkpoint that takes less is written late, and nobody minds


class Checkpointing:
    """Snapshots every so many steps, checkpoints every so often; both become good when healthy steps came after."""

    def __init__(
        self,
        directory: Path,
        engine: Engine,
        whole: Whole,
        agreement: Agreement,
        telling: Telling,
        *,
        every: Every,
        keep: int,
        snapshot_every: int,
        snapshots_on: str,
        besides: Callable[[], dict[str, Any]],
    ) -> None:
        self._directory, self._engine, self._whole = directory, engine, whole
        self._agreement, self._telling, self._every = agreement, telling, every
        self._snapshot_every, self._besides = snapshot_every, besides
        self.snapshots = Snapshots(engine.device, snapshots_on)
        self._saver = Saver(directory, keep, agreement.saving, speaks=agreement.rank == 0)
        self._written: list[Job] = []  # whose checkpoints are not known to be good
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._late_told: Job | None = None
        self._wanted: tuple[int, Callable[[int], object]] | None = None  # the last step, and what is to be done
        self.failures = 0  # in a row
        self.last: Checkpoint | None = None
        self.last_good: Checkpoint | None = None

    # Keeping

    def begin(self, step: int, resumed: Checkpoint | None) -> None:
        """The state to begin with is as good as any: there is no other."""
        to_json(self._take(step).plain, "the state")  # which refuses what cannot be saved, now and not in an hour
        self.snapshots.promote(self.snapshots.candidates[-1])
        self._saved_at = time.monotonic()
        self.last = resumed
        if resumed is not None:
            self._saved_step = step
            self.last_good = resumed if resumed.good else None
            if not resumed.good:  # it may become so
                self._written = [Job(self.snapshots.kept[-1], {}, frozenset(), None, {}, checkpoint=resumed)]

    def _take(self, step: int) -> Snapshot:
        for unlikely in self.snapshots.candidates[1:-1]:  # the oldest is the next to become good
            self.snapshots.drop(unlikely)
        live = self._whole.live()
        live.plain.update(self._besides())
        self._live = live
        return self.snapshots.take(step, live)

    def data_begins(self, position: Any) -> None:
        """Snapshots from before there was any go back to its beginning."""
        for taken in self.snapshots.kept:
            taken.plain["data"] = position if taken.plain.get("data") is None else taken.plain["data"]

    def before_update(self) -> None:
        self.snapshots.before_update()

    def is_due(self, step: int) -> bool:
        """A checkpoint, by the steps or by the clock of this rank, which cannot be set back."""
        if self._every.steps is not None:
            return step - max(self._saved_step, 0) >= self._every.steps
        return time.monotonic() - self._saved_at >= (self._every.seconds or 0.0)

    @property
    def busy(self) -> bool:
        return self._saver.busy

    def after(self, step: int, agreed: Agreed) -> None:
        """A step was closed, and all is well: whether its state is to be kept, when the user is done with it."""
        if agreed.due and agreed.busy:
            self._tell_late(step)
        elif agreed.due:
            self._wanted = step, self._save
        elif step % self._snapshot_every == 0:
            self._wanted = step, self._take

    def keep_wanted(self) -> None:
        """Between two steps, before the next batch is fetched: with averages of weights, say, that follow each step."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            step, keep = wanted
            try:
                keep(step)
            except (torch.OutOfMemoryError, MemoryError) as error:  # for the copy: training has what it needs
                self._tell_failed(step, error)

    def _save(self, step: int) -> None:
        self._saved_at, self._saved_step = time.monotonic(), step
        taken = self._take(step)
        live, plain = self._live, to_json(taken.plain, "the state")
        next_good = self._written[0].checkpoint if self._written else None
        spared = frozenset() if next_good is None else frozenset({next_good.path})
        self._saver.begin(Job(taken, live.tensors, live.moving, plain, self._about(), live.transient, spared))

    def save_now(self, step: int) -> Checkpoint | None:
        """Write it, and wait; None if it could not be written, which is told."""
        self._wanted = None
        self.collect(wait=True)
        if self._agreement.first_says(self._saved_step == step and self._is_last(step)):
            return self.last
        self._save(step)
        self.collect(wait=True)
        return self.last if self._is_last(step) else None

    def _is_last(self, step: int) -> bool:
        return self.last is not None and self.last.step == step

    def _about(self) -> dict[str, Any]:
        """For people, and for ``ampwise resume --show``."""
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

    # What became of them

    def collect(self, *, wait: bool = False) -> None:
        """Look whether a checkpoint is done."""
        job = self._saver.wait() if wait else self._saver.finished()
        if job is None:
            return
        self.snapshots.release(job.snapshot)
        if job.checkpoint is not None:
            self._has_written(job, job.checkpoint)
        else:
            self._has_failed(job)

    def _has_written(self, job: Job, checkpoint: Checkpoint) -> None:
        self.failures = 0
        if job.undone_to is not None:
            self._undo(checkpoint, job.undone_to)
            return
        self.last = checkpoint
        job.live, job.plain = {}, None  # which are large
        self._written = [*self._written[:1], job]  # the oldest is the next to become good

    def _has_failed(self, job: Job) -> None:
        step = job.snapshot.step
        self.failures += 1
        if job.not_finite:
            names = tuple(job.not_finite[:NAMED])
            self._telling.tell(
                WeightsNotFinite(step=step, names=names, count=len(job.not_finite), where="checkpoint"), step
            )
            if not job.snapshot.good:
                self.snapshots.drop(job.snapshot)
            return
        self._tell_failed(step, job.error or RuntimeError("nothing was written"))

    def _tell_failed(self, step: int, error: Exception) -> None:
        self._telling.tell(
            CheckpointFailed(
                step=step,
                directory=str(self._directory),
                error=str(error) or type(error).__name__,
                kind=kind_of(error),
                failures_in_a_row=self.failures,
                last="" if self.last is None else str(self.last.path),
            ),
            step,
        )

    def _tell_late(self, step: int) -> None:
        job, now = self._saver.job, time.monotonic()
        if job is not None and job is not self._late_told and now - job.began > LATE_S:
            self._late_told = job
            every = self._every.seconds or now - self._saved_at
            self._telling.tell(CheckpointLate(step=step, seconds=now - job.began, every=every), step)

    def trust(self, number: int, healthy: int) -> None:
        """So many healthy steps in a row, up to this one: what was kept before them is good."""
        for taken in self.snapshots.candidates:
            if taken.step <= number - healthy:
                self.snapshots.promote(taken)
        for job in [each for each in self._written if each.snapshot.step <= number - healthy]:
            self._written.remove(job)
            if job.checkpoint is not None and self._agreement.rank == 0:
                self._promote(job.checkpoint)

    def _promote(self, checkpoint: Checkpoint) -> None:
        try:
            self.last_good = promote(checkpoint)
        except (OSError, BadInput) as error:
            self._telling.say(f"{checkpoint.path} could not be marked as good: {error}")

    def undo_after(self, step: int) -> None:
        """Steps after this one never were: checkpoints of them are not to be gone on from."""
        self._wanted = None
        self.snapshots.drop_after(step)
        job = self._saver.job  # being written, or written and not looked at yet
        if job is not None and job.snapshot.step > step:
            job.undone_to = step
        self._written = [each for each in self._written if each.snapshot.step <= step]
        self._saved_step = min(self._saved_step, step)
        self.last = self._agreement.first_says(self._last_after_undoing(step))

    def _last_after_undoing(self, step: int) -> Checkpoint | None:
        """By the first rank, which marks those of later steps."""
        if self._agreement.rank != 0:
            return None
        try:
            found = checkpoints(self._directory)
        except BadInput as error:  # it cannot even be listed
            self._telling.say(str(error))
            return None
        for checkpoint in found:
            if checkpoint.step > step and not checkpoint.trouble:
                self._undo(checkpoint, step)
        return next((each for each in found if each.step <= step and not each.trouble), None)

    def _undo(self, checkpoint: Checkpoint, step: int) -> None:
        if self._agreement.rank == 0:
            try:
                undo(checkpoint, step)
            except (OSError, BadInput) as error:
                self._telling.say(f"{checkpoint.path} could not be set aside: {error}")

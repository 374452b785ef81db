"""Checkpoints written beside the training, in a thread: one at a time."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ampwise.guard.disk.catalog import Checkpoint, discredit, prune
from ampwise.guard.snapshots import Snapshot

__all__ = ["Job", "Saver", "kind_of", "not_finite", "undo"]

STATISTICS = (".running_mean", ".running_var")


@dataclass(slots=True, eq=False)
class Job:
    """A checkpoint to be written, and how that went."""

    snapshot: Snapshot
    live: Mapping[str, Tensor]  # what the values are of; only their shapes and places are looked at
    moving: frozenset[str]  # names of those that each rank may have its own of
    plain: Any  # this rank's, as JSON
    about: Mapping[str, Any]
    transient: frozenset[str] = frozenset()  # names of buffers that are not persistent, which may hold anything
    spared: frozenset[Path] = frozenset()  # checkpoints that are not to be pruned for it
    began: float = field(default_factory=time.monotonic)
    checkpoint: Checkpoint | None = None
    error: Exception | None = None
    not_finite: list[str] = field(default_factory=list)  # weights, on any rank; it was not written then
    undone_to: int | None = None  # meanwhile, the run went back to this step, before it


class Saver:
    """Writes to a directory; ``finished`` tells what came of it, and nothing is raised."""

    def __init__(self, directory: Path, keep: int, group: Any, *, speaks: bool) -> None:
        self._directory, self._keep, self._group, self._speaks = directory, keep, group, speaks
        self._thread: threading.Thread | None = None
        self._job: Job | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def job(self) -> Job | None:
        return self._job

    def begin(self, job: Job) -> None:
        """All ranks begin in the same step, when none is busy."""
        job.snapshot.held = True
        self._job = job
        self._thread = threading.Thread(target=self._write, args=(job,), name="ampwise-guard-save", daemon=True)
        self._thread.start()

    def finished(self) -> Job | None:
        """The checkpoint that was written last, or failed to be, once."""
        if self._thread is None or self._thread.is_alive():
            return None
        job, self._job, self._thread = self._job, None, None
        return job

    def wait(self) -> Job | None:
        """The same, when it is done; None if there is none."""
        if self._thread is not None:
            self._thread.join()
        return self.finished()

    def _write(self, job: Job) -> None:
        from ampwise.guard.disk.writing import write_checkpoint

        try:
            job.snapshot.wait()
            staged = {name: value.cpu() for name, value in job.snapshot.values.items()}
            ours = {name: value for name, value in staged.items() if name not in job.transient}
            job.not_finite = self._anywhere(not_finite(ours, job.moving))
            if not job.not_finite:
                job.checkpoint = write_checkpoint(
                    self._directory,
                    step=job.snapshot.step,
                    live=job.live,
                    staged=staged,
                    plain=job.plain,
                    about=job.about,
                    group=self._group,
                    alike=set(staged) - job.moving,
                )
                if self._speaks:
                    self._put_in_order(job, job.checkpoint)
        except Exception as error:
            job.error = error

    def _put_in_order(self, job: Job, checkpoint: Checkpoint) -> None:
        if job.undone_to is not None:
            undo(checkpoint, job.undone_to)
        else:
            prune(self._directory, self._keep, job.spared)

    def _anywhere(self, names: list[str]) -> list[str]:
        if self._group is None:
            return names
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, names, group=self._group)
        return sorted({name for found in everyone for name in found})


def undo(checkpoint: Checkpoint, step: int) -> None:
    """Mark it as one of steps that never were."""
    discredit(checkpoint, f"the run went back to step {step:,}, before it", undone=True)


def not_finite(values: Mapping[str, Tensor], buffers: Collection[str]) -> list[str]:
    """Tensors of models that are not to be gone on with. Buffers may be infinite, such as masks; statistics may not."""
    ours = {name: value for name, value in values.items() if name.startswith("model.")}
    may_be_infinite = {name for name in buffers if not name.endswith(STATISTICS)}
    return [name for name, value in ours.items() if not _is_sound(value, infinite=name in may_be_infinite)]


def _is_sound(value: Tensor, *, infinite: bool) -> bool:
    if not (value.is_floating_point() or value.is_complex()) or value.itemsize == 1:
        return True
    return not bool(value.isnan().any()) if infinite else bool(value.isfinite().all())


def kind_of(error: BaseException) -> Any:
    """What a person has to mend: "full", "read-only", "permission" or "other"."""
    kinds = {
        errno.ENOSPC: "full",
        errno.EDQUOT: "full",
        errno.EFBIG: "full",
        errno.EROFS: "read-only",
        errno.EACCES: "permission",
        errno.EPERM: "permission",
    }
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in kinds:
            return kinds[seen.errno]
        seen = seen.__cause__ or seen.__context__
    return "other"

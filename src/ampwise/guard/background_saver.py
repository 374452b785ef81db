"""Write checkpoints in a background thread, one at a time."""

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

from ampwise.guard.disk.catalog import SavedCheckpoint, mark_bad, prune
from ampwise.guard.snapshots import MemorySnapshot

__all__ = ["BackgroundSaver", "SaveJob", "mark_undone", "non_finite_tensors", "write_error_kind"]

STATISTICS = (".running_mean", ".running_var")


@dataclass(slots=True, eq=False)
class SaveJob:
    """A checkpoint to write, and the result."""

    snapshot: MemorySnapshot
    live: Mapping[str, Tensor]  # the tensors that were copied; used only for shapes and shards
    moving: frozenset[str]  # names of tensors that may differ between ranks
    plain: Any  # this rank's plain state, as JSON
    about: Mapping[str, Any]
    transient: frozenset[str] = frozenset()  # names of non-persistent buffers, which may hold anything
    spared: frozenset[Path] = frozenset()  # checkpoints that must not be pruned
    began: float = field(default_factory=time.monotonic)
    checkpoint: SavedCheckpoint | None = None
    error: Exception | None = None
    bad_tensors: list[str] = field(
        default_factory=list
    )  # weights with inf or NaN, on any rank; then nothing is written
    undone_to: int | None = None  # the run went back to this earlier step in the meantime


class BackgroundSaver:
    """Writes checkpoints to a directory; ``finished`` returns the result, errors are not raised."""

    def __init__(self, directory: Path, keep: int, group: Any, *, prunes: bool) -> None:
        self._directory, self._keep, self._group, self._prunes = directory, keep, group, prunes
        self._thread: threading.Thread | None = None
        self._job: SaveJob | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def job(self) -> SaveJob | None:
        return self._job

    def begin(self, job: SaveJob) -> None:
        """Start writing; all ranks call this at the same step, when none is busy."""
        job.snapshot.held = True
        self._job = job
        self._thread = threading.Thread(target=self._write, args=(job,), name="ampwise-guard-save", daemon=True)
        self._thread.start()

    def finished(self) -> SaveJob | None:
        """Return the job that has finished or failed, once."""
        if self._thread is None or self._thread.is_alive():
            return None
        job, self._job, self._thread = self._job, None, None
        return job

    def wait(self) -> SaveJob | None:
        """Wait for the job that is running, and return it; None if there is none."""
        if self._thread is not None:
            self._thread.join()
        return self.finished()

    def _write(self, job: SaveJob) -> None:
        from ampwise.guard.disk.writing import write_checkpoint

        try:
            job.snapshot.wait()
            staged = {name: value.cpu() for name, value in job.snapshot.values.items()}
            ours = {name: value for name, value in staged.items() if name not in job.transient}
            job.bad_tensors = self._on_any_rank(non_finite_tensors(ours, job.moving))
            if not job.bad_tensors:
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
                if self._prunes:
                    self._mark_or_prune(job, job.checkpoint)
        except Exception as error:
            job.error = error

    def _mark_or_prune(self, job: SaveJob, checkpoint: SavedCheckpoint) -> None:
        if job.undone_to is not None:
            mark_undone(checkpoint, job.undone_to)
        else:
            prune(self._directory, self._keep, job.spared)

    def _on_any_rank(self, names: list[str]) -> list[str]:
        if self._group is None:
            return names
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, names, group=self._group)
        return sorted({name for found in everyone for name in found})


def mark_undone(checkpoint: SavedCheckpoint, step: int) -> None:
    """Mark a checkpoint as undone: the run went back to an earlier step."""
    mark_bad(checkpoint, f"the run was rolled back to step {step:,}", undone=True)


def non_finite_tensors(values: Mapping[str, Tensor], buffers: Collection[str]) -> list[str]:
    """Return the names of model tensors with inf or NaN. Buffers such as masks may have inf; running statistics not."""
    ours = {name: value for name, value in values.items() if name.startswith("model.")}
    may_be_infinite = {name for name in buffers if not name.endswith(STATISTICS)}
    return [name for name, value in ours.items() if not _is_sound(value, infinite=name in may_be_infinite)]


def _is_sound(value: Tensor, *, infinite: bool) -> bool:
    if not (value.is_floating_point() or value.is_complex()) or value.itemsize == 1:
        return True
    return not bool(value.isnan().any()) if infinite else bool(value.isfinite().all())


def write_error_kind(error: BaseException) -> Any:
    """Classify why a checkpoint could not be written: "full", "read-only", "permission" or "other"."""
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

"""Write a checkpoint: into a temporary folder, verified and sealed, and only then renamed into place.

torch.distributed.checkpoint plans which rank writes what and coordinates the ranks; JSON replaces its pickles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ampwise.errors import BadInput
from ampwise.finding.strict_json import refuse_many
from ampwise.guard.disk.catalog import BEING_WRITTEN, SavedCheckpoint, checkpoint_from_manifest, next_number
from ampwise.guard.disk.durable_files import checksum, sync_folder
from ampwise.guard.disk.layout import (
    LARGEST_MANIFEST,
    LARGEST_PLAIN,
    MANIFEST,
    MOST_PARTS,
    MOST_RANKS,
    SEAL,
    folder_name,
    plain_file,
    temporary_folder,
    tensors_file,
)
from ampwise.guard.disk.manifest import LONGEST_NAME, CheckpointManifest, StoredFile, StoredTensor, TensorPiece
from ampwise.guard.disk.rank_errors import checked_together, rank_in, readable_error, size_of
from ampwise.runs.files import write_atomically
from ampwise.runs.tensor_files import CODES, METADATA, refuse_unwritable, write_tensors

__all__ = ["write_checkpoint"]

MOST_ATTEMPTS = 100_000  # at one step
SPARE_BYTES = 1_000_000  # bytes for the manifest and file system overhead
LONGEST_LABEL = 1000  # characters for a piece's offsets after its tensor's name


def write_checkpoint(
    directory: str | Path,
    *,
    step: int,
    live: Mapping[str, Tensor],
    staged: Mapping[str, Tensor],
    plain: Any,
    about: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    alike: Collection[str] = (),
) -> SavedCheckpoint:
    """Write a checkpoint and return it. Every rank of ``group``, which must use gloo, calls this; None: one process.

    live: the tensors of the state, used only for shapes and shards. staged: their values on the CPU, under the same
    names; this rank's shard for a DTensor. plain: this rank's JSON data. alike: names of tensors that are the same on
    all ranks, so that any rank may write them; of others, rank 0's values are written. If it fails on one rank, all
    raise NotSaved (an OSError) or BadInput, and nothing is left on disk.
    """
    home = Path(directory)
    planner, writer = (
        _StagedPlanner(staged, alike),
        _CheckpointWriter(home, step, about, rank_in(group), size_of(group)),
    )

    def check() -> None:
        _check(step, live, staged)
        writer.take(plain)

    try:
        checked_together(group, check)
        metadata = _save(dict(live), planner, writer, group)
    except (CheckpointException, Exception) as error:
        raise readable_error(error, f"a checkpoint of step {step} cannot be written to {home}", group) from error
    finally:
        writer.clear()
    written: SavedCheckpoint = metadata.storage_data
    return written


def _save(
    live: dict[str, Any], planner: DefaultSavePlanner, writer: StorageWriter, group: dist.ProcessGroup | None
) -> Metadata:
    if group is not None:
        saved: Metadata = save(live, storage_writer=writer, planner=planner, process_group=group)
        return saved
    # The same without a group: save() would warn about that, and in torch 2.6 use the default group.
    planner.set_up_planner(live, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return metadata


# --- checks --------------------------------------------------------------------------------------------------------


def _check(step: int, live: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
    """Raise BadInput for tensors that cannot be written, or not read again."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise BadInput(f"write_checkpoint(step={step!r}): expected a whole number, 0 or more.")
    if unpaired := live.keys() ^ staged.keys():
        raise BadInput(f"{min(unpaired)!r} is in only one of live and staged.")
    for name, tensor in staged.items():
        if not name or name == METADATA or not name.isprintable() or len(name) > LONGEST_NAME - LONGEST_LABEL:
            raise BadInput(f"{name[:80]!r} is not a valid tensor name in a checkpoint.")
        if not isinstance(tensor, Tensor) or not isinstance(live[name], Tensor):
            raise BadInput(f"{name!r} is not a tensor; put it in the plain data.")
        if tensor.device.type != "cpu" or tensor.dtype != live[name].dtype:
            raise BadInput(
                f"{name!r} is staged as {tensor.dtype} on {tensor.device}, expected {live[name].dtype} on cpu."
            )
        refuse_unwritable(repr(name), tensor)


def _as_json(plain: Any) -> bytes:
    try:
        data = json.dumps(plain, allow_nan=False).encode()
        refuse_many(data, MOST_PARTS)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the plain data cannot be written as JSON: {error}.") from error
    if len(data) > LARGEST_PLAIN:
        raise BadInput(f"the plain data has {len(data):,} bytes as JSON; the limit is {LARGEST_PLAIN:,}.")
    return data


class _StagedPlanner(DefaultSavePlanner):
    """Plans with the live tensors, and writes the staged ones."""

    def __init__(self, staged: Mapping[str, Tensor], alike: Collection[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged, self._alike = staged, frozenset(alike)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # An empty shard has nothing to write, and its offsets may be those of another shard.
        return dataclasses.replace(plan, items=[item for item in plan.items if _has_values(item)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(self._without_duplicates(all_plans))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._staged[index.fqn]

    def _is_written_once(self, item: WriteItem) -> bool:
        """Whether the first rank that has this full tensor has to write it."""
        facts = item.tensor_data
        is_number = facts is not None and math.prod(facts.size) <= 1
        return item.type == WriteItemType.TENSOR and (is_number or item.index.fqn not in self._alike)

    def _without_duplicates(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Let the first rank that has an unsharded tensor write it.

        Each rank has its own buffers, such as running means, and DDP uses rank 0's. All ranks read scalars, such as an
        optimizer's step counters, and each rank verifies every file that it reads from completely.
        """
        seen: set[str] = set()
        kept = []
        for plan in plans:
            whole = {item.index.fqn for item in plan.items if self._is_written_once(item)}
            kept.append(
                dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in whole & seen])
            )
            seen |= whole
        return kept


def _has_values(item: WriteItem) -> bool:
    facts = item.tensor_data
    return facts is None or math.prod(facts.chunk.sizes) > 0 or math.prod(facts.size) == 0


# --- writing -------------------------------------------------------------------------------------------------------


class _RankOutput(NamedTuple):
    """Files and pieces that a rank has written."""

    files: dict[str, StoredFile]
    pieces: list[tuple[str, TensorPiece]]


class _CheckpointWriter(StorageWriter):
    """Writes two files per rank; rank 0 also writes the manifest and renames the folder into place."""

    def __init__(self, home: Path, step: int, about: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._home, self._step, self._about = home, step, about
        self._rank, self._world_size = rank, world_size
        self._plain = b""
        self._aside: Path | None = None  # only on rank 0, which creates and removes it

    def take(self, plain: Any) -> None:
        """Set this rank's plain data."""
        self._plain = _as_json(plain)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # a writer belongs to one checkpoint

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if not is_coordinator:
            return
        if self._world_size > MOST_RANKS:
            raise BadInput(f"a checkpoint of {self._world_size} ranks; the limit is {MOST_RANKS:,}.")
        self._home.mkdir(parents=True, exist_ok=True)
        self._aside = temporary_folder(self._home, self._step, "new")
        BEING_WRITTEN.add(self._aside)
        self._aside.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the free disk space, and send the name of the folder to all ranks with their plans."""
        assert self._aside is not None
        needed = sum(map(_size, plans)) + len(self._plain) * len(plans) + SPARE_BYTES
        free = shutil.disk_usage(self._home).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs about {needed:,} bytes, and {free:,} are free")
        return [dataclasses.replace(plan, storage_data=self._aside.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = self._home / plan.storage_data
        if not folder.is_dir():
            raise OSError(errno.ENOENT, f"{folder}, which rank 0 created, is not here: all ranks must share a disk")
        pieces = [(item.index.fqn, _piece(item, tensors_file(self._rank))) for item in plan.items]
        tensors = {
            piece.key: _value(planner.resolve_data(item), item)
            for item, (_, piece) in zip(plan.items, pieces, strict=True)
        }
        if len(tensors) < len(pieces):
            raise BadInput("two tensors, or pieces of them, have the same name in a file.")
        written = write_tensors(folder / tensors_file(self._rank), tensors)
        write_atomically(folder / plain_file(self._rank), [self._plain])
        files = {
            tensors_file(self._rank): StoredFile(written.size, written.sha256),
            plain_file(self._rank): StoredFile(len(self._plain), hashlib.sha256(self._plain).hexdigest()),
        }
        _verify_files(folder, files)
        sync_folder(folder)
        return _done([WriteResult(MetadataIndex(""), written.size, _RankOutput(files, pieces))])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest on rank 0 after all ranks have written; ``metadata`` then reaches all ranks."""
        assert self._aside is not None
        manifest = self._manifest(metadata, [result.storage_data for (result,) in results])
        text = manifest.text().encode()
        if len(text) > LARGEST_MANIFEST:
            raise BadInput(f"the manifest has {len(text):,} bytes; the limit is {LARGEST_MANIFEST:,}.")
        CheckpointManifest.parse(text)  # it must be readable
        write_atomically(self._aside / MANIFEST, [text])
        write_atomically(self._aside / SEAL, [f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()])
        sync_folder(self._aside)
        metadata.storage_data = checkpoint_from_manifest(_put_in_place(self._aside, self._home, self._step), manifest)

    def clear(self) -> None:
        """Remove the temporary folder if it is still there: the checkpoint is incomplete then."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            BEING_WRITTEN.discard(self._aside)

    def _manifest(self, metadata: Metadata, shares: list[_RankOutput]) -> CheckpointManifest:
        pieces: dict[str, list[TensorPiece]] = {}
        for share in shares:
            for name, piece in share.pieces:
                pieces.setdefault(name, []).append(piece)
        return CheckpointManifest(
            step=self._step,
            number=next_number(self._home),
            saved=time.time(),
            world_size=self._world_size,
            about=dict(self._about),
            files={name: file for share in shares for name, file in share.files.items()},
            tensors={name: _stored(metadata, name, found) for name, found in pieces.items()},
        )


def _stored(metadata: Metadata, name: str, pieces: list[TensorPiece]) -> StoredTensor:
    facts = metadata.state_dict_metadata[name]
    assert isinstance(facts, TensorStorageMetadata)
    return StoredTensor(CODES[facts.properties.dtype], tuple(facts.size), tuple(pieces))


def _piece(item: WriteItem, file: str) -> TensorPiece:
    if item.tensor_data is None:
        raise BadInput(f"{item.index.fqn!r} is not a tensor; put it in the plain data.")
    offsets, sizes = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
    if sizes == tuple(item.tensor_data.size):
        return TensorPiece(file, item.index.fqn, offsets, sizes)
    place = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return TensorPiece(file, f"{item.index.fqn} [{place}]", offsets, sizes)


def _value(tensor: Any, item: WriteItem) -> Tensor:
    assert isinstance(tensor, Tensor)
    assert item.tensor_data is not None
    if tensor.shape != torch.Size(item.tensor_data.chunk.sizes):
        raise BadInput(
            f"{item.index.fqn!r} is staged with shape {tuple(tensor.shape)}, expected "
            f"{tuple(item.tensor_data.chunk.sizes)} on this rank."
        )
    return tensor


def _size(plan: SavePlan) -> int:
    items = (item.tensor_data for item in plan.items)
    return sum(math.prod(facts.chunk.sizes) * facts.properties.dtype.itemsize for facts in items if facts is not None)


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


# --- verifying and renaming ----------------------------------------------------------------------------------------


def _verify_files(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Read the files back, from the disk where the system allows that, and compare checksums."""
    for name, file in files.items():
        if checksum(folder / name, file.bytes, from_disk=True) != file.sha256:
            raise OSError(errno.EIO, f"{name} differs from what was written when read back")


def _put_in_place(folder: Path, home: Path, step: int) -> Path:
    """Rename the folder to a free name and sync; undo the rename if the sync fails."""
    for path in _free_paths(home, step):
        try:
            folder.rename(path)
        except OSError:  # another process took the name
            if not os.path.lexists(path):
                raise
            continue
        try:
            sync_folder(home)
        except OSError:
            with contextlib.suppress(OSError):
                path.rename(folder)
            raise
        return path
    raise BadInput(f"{home} already has {MOST_ATTEMPTS} checkpoints of step {step}. Remove some.")


def _free_paths(home: Path, step: int) -> Iterator[Path]:
    paths = (home / folder_name(step, attempt) for attempt in range(1, MOST_ATTEMPTS + 1))
    return (path for path in paths if not os.path.lexists(path))

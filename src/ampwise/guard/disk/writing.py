"""A checkpoint written: into a folder aside, proven, sealed, and only then put in place.

torch.distributed.checkpoint plans who writes what and brings the ranks together; what it would pickle is JSON here.
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
from ampwise.guard.disk.catalog import BEING_WRITTEN, Checkpoint, described, next_number
from ampwise.guard.disk.durable import checksum, sync_folder
from ampwise.guard.disk.layout import (
    LARGEST_MANIFEST,
    LARGEST_PLAIN,
    MANIFEST,
    MOST_PARTS,
    MOST_RANKS,
    SEAL,
    aside,
    folder_name,
    plain_file,
    tensors_file,
)
from ampwise.guard.disk.manifest import LONGEST_NAME, Manifest, Piece, StoredFile, StoredTensor
from ampwise.guard.disk.ranks import checked_together, explained, rank_in, size_of
from ampwise.record.files import write_aside
from ampwise.strict_json import refuse_many
from ampwise.tensors_on_disk import CODES, METADATA, refuse_unwritable, write_tensors

__all__ = ["write_checkpoint"]

MOST_ATTEMPTS = 100_000  # at one step
ROOM_TO_SPARE = 1_000_000  # bytes, for the manifest and what a file system keeps for itself
LONGEST_LABEL = 1000  # of where a piece lies, after the name of its tensor


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
) -> Checkpoint:
    """Write a checkpoint and return it; on every rank of the group, which has to be a gloo one, or alone without one.

    live: the tensors of the state, of which only shapes and shards are looked at; staged: what they held, by the same
    names, on the CPU; of a DTensor, what this rank has of it. plain: what JSON has a form for, of this rank. alike:
    names whose tensors are the same on every rank, so that any rank may write them; others are written as the first
    rank has them. NotSaved (an OSError) or BadInput, on all ranks, if it failed on one: nothing is left of it then.
    """
    home = Path(directory)
    planner, writer = _Planner(staged, alike), _Writer(home, step, about, rank_in(group), size_of(group))

    def check() -> None:
        _check(step, live, staged)
        writer.take(plain)

    try:
        checked_together(group, check)
        metadata = _save(dict(live), planner, writer, group)
    except (CheckpointException, Exception) as error:
        raise explained(error, f"a checkpoint of step {step} cannot be written to {home}", group) from error
    finally:
        writer.clear()
    written: Checkpoint = metadata.storage_data
    return written


def _save(
    live: dict[str, Any], planner: DefaultSavePlanner, writer: StorageWriter, group: dist.ProcessGroup | None
) -> Metadata:
    if group is not None:
        saved: Metadata = save(live, storage_writer=writer, planner=planner, process_group=group)
        return saved
    # The same without anybody to meet: save would warn of that, and in torch 2.6 meet the default group.
    planner.set_up_planner(live, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return metadata


# --- what is refused -----------------------------------------------------------------------------------------------


def _check(step: int, live: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
    """BadInput for what could not be written, or not be read again."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise BadInput(f"write_checkpoint(step={step!r}): a step is a number from 0.")
    if unpaired := live.keys() ^ staged.keys():
        raise BadInput(f"{min(unpaired)!r} is in one of live and staged, and not in the other.")
    for name, tensor in staged.items():
        if not name or name == METADATA or not name.isprintable() or len(name) > LONGEST_NAME - LONGEST_LABEL:
            raise BadInput(f"{name[:80]!r} is no name that a tensor can have in a checkpoint.")
        if not isinstance(tensor, Tensor) or not isinstance(live[name], Tensor):
            raise BadInput(f"{name!r} is no tensor; what is none belongs to the plain data.")
        if tensor.device.type != "cpu" or tensor.dtype != live[name].dtype:
            raise BadInput(f"{name!r} is staged as {tensor.dtype} on {tensor.device}, not {live[name].dtype} on cpu.")
        refuse_unwritable(repr(name), tensor)


def _as_json(plain: Any) -> bytes:
    try:
        data = json.dumps(plain, allow_nan=False).encode()
        refuse_many(data, MOST_PARTS)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the plain data has no form in JSON: {error}.") from error
    if len(data) > LARGEST_PLAIN:
        raise BadInput(f"the plain data has {len(data):,} bytes as JSON, and {LARGEST_PLAIN:,} is the most.")
    return data


class _Planner(DefaultSavePlanner):
    """Plans by the live tensors, and gives the staged ones to be written."""

    def __init__(self, staged: Mapping[str, Tensor], alike: Collection[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged, self._alike = staged, frozenset(alike)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # Of a shard that is empty nothing has to be written, and its place may be that of another.
        return dataclasses.replace(plan, items=[item for item in plan.items if _has_values(item)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(self._first_come(all_plans))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._staged[index.fqn]

    def _is_the_firsts(self, item: WriteItem) -> bool:
        """Whether it is a whole tensor that ranks do not share the writing of."""
        facts = item.tensor_data
        is_number = facts is not None and math.prod(facts.size) <= 1
        return item.type == WriteItemType.TENSOR and (is_number or item.index.fqn not in self._alike)

    def _first_come(self, plans: list[SavePlan]) -> list[SavePlan]:
        """What is not spread among ranks is written by the first that has it.

        Each rank has buffers of its own, such as running means, and DDP goes on with the first rank's. Single numbers,
        such as the counters of an optimizer, all ranks read again, and a file that a rank needs it reads whole.
        """
        seen: set[str] = set()
        kept = []
        for plan in plans:
            whole = {item.index.fqn for item in plan.items if self._is_the_firsts(item)}
            kept.append(
                dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in whole & seen])
            )
            seen |= whole
        return kept


def _has_values(item: WriteItem) -> bool:
    facts = item.tensor_data
    return facts is None or math.prod(facts.chunk.sizes) > 0 or math.prod(facts.size) == 0


# --- what is written -----------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """What a rank has written."""

    files: dict[str, StoredFile]
    pieces: list[tuple[str, Piece]]


class _Writer(StorageWriter):
    """Each rank writes two files; the first one says so in the manifest, and puts the folder in place."""

    def __init__(self, home: Path, step: int, about: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._home, self._step, self._about = home, step, about
        self._rank, self._world_size = rank, world_size
        self._plain = b""
        self._aside: Path | None = None  # on the first rank, which makes and removes it

    def take(self, plain: Any) -> None:
        """What this rank is to write besides tensors."""
        self._plain = _as_json(plain)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # a writer is made for one checkpoint

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if not is_coordinator:
            return
        if self._world_size > MOST_RANKS:
            raise BadInput(f"a checkpoint of {self._world_size} ranks: {MOST_RANKS:,} are the most.")
        self._home.mkdir(parents=True, exist_ok=True)
        self._aside = aside(self._home, self._step, "new")
        BEING_WRITTEN.add(self._aside)
        self._aside.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The ranks learn the name of the folder with their plans."""
        assert self._aside is not None
        needed = sum(map(_size, plans)) + len(self._plain) * len(plans) + ROOM_TO_SPARE
        free = shutil.disk_usage(self._home).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it takes about {needed:,} bytes, and {free:,} are free")
        return [dataclasses.replace(plan, storage_data=self._aside.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = self._home / plan.storage_data
        if not folder.is_dir():
            raise OSError(errno.ENOENT, f"{folder} is not there, which the first rank made: ranks have to share a disk")
        pieces = [(item.index.fqn, _piece(item, tensors_file(self._rank))) for item in plan.items]
        tensors = {
            piece.key: _value(planner.resolve_data(item), item)
            for item, (_, piece) in zip(plan.items, pieces, strict=True)
        }
        if len(tensors) < len(pieces):
            raise BadInput("two tensors, or pieces of them, would have the same name in a file.")
        written = write_tensors(folder / tensors_file(self._rank), tensors)
        write_aside(folder / plain_file(self._rank), [self._plain])
        files = {
            tensors_file(self._rank): StoredFile(written.size, written.sha256),
            plain_file(self._rank): StoredFile(len(self._plain), hashlib.sha256(self._plain).hexdigest()),
        }
        _prove(folder, files)
        sync_folder(folder)
        return _done([WriteResult(MetadataIndex(""), written.size, _Share(files, pieces))])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank alone, when all have written; what it leaves in the metadata reaches all of them."""
        assert self._aside is not None
        manifest = self._manifest(metadata, [result.storage_data for (result,) in results])
        text = manifest.text().encode()
        if len(text) > LARGEST_MANIFEST:
            raise BadInput(f"the manifest has {len(text):,} bytes, and {LARGEST_MANIFEST:,} is the most.")
        Manifest.parse(text)  # what could not be read again is no checkpoint
        write_aside(self._aside / MANIFEST, [text])
        write_aside(self._aside / SEAL, [f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()])
        sync_folder(self._aside)
        metadata.storage_data = described(_put_in_place(self._aside, self._home, self._step), manifest)

    def clear(self) -> None:
        """What is still aside is not whole."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            BEING_WRITTEN.discard(self._aside)

    def _manifest(self, metadata: Metadata, shares: list[_Share]) -> Manifest:
        pieces: dict[str, list[Piece]] = {}
        for share in shares:
            for name, piece in share.pieces:
                pieces.setdefault(name, []).append(piece)
        return Manifest(
            step=self._step,
            number=next_number(self._home),
            saved=time.time(),
            world_size=self._world_size,
            about=dict(self._about),
            files={name: file for share in shares for name, file in share.files.items()},
            tensors={name: _stored(metadata, name, found) for name, found in pieces.items()},
        )


def _stored(metadata: Metadata, name: str, pieces: list[Piece]) -> StoredTensor:
    facts = metadata.state_dict_metadata[name]
    assert isinstance(facts, TensorStorageMetadata)
    return StoredTensor(CODES[facts.properties.dtype], tuple(facts.size), tuple(pieces))


def _piece(item: WriteItem, file: str) -> Piece:
    if item.tensor_data is None:
        raise BadInput(f"{item.index.fqn!r} is no tensor; what is none belongs to the plain data.")
    offsets, sizes = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
    if sizes == tuple(item.tensor_data.size):
        return Piece(file, item.index.fqn, offsets, sizes)
    place = ", ".join(f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return Piece(file, f"{item.index.fqn} [{place}]", offsets, sizes)


def _value(tensor: Any, item: WriteItem) -> Tensor:
    assert isinstance(tensor, Tensor)
    assert item.tensor_data is not None
    if tensor.shape != torch.Size(item.tensor_data.chunk.sizes):
        raise BadInput(
            f"{item.index.fqn!r} is staged with shape {tuple(tensor.shape)}, and this rank has "
            f"{tuple(item.tensor_data.chunk.sizes)} of it."
        )
    return tensor


def _size(plan: SavePlan) -> int:
    items = (item.tensor_data for item in plan.items)
    return sum(math.prod(facts.chunk.sizes) * facts.properties.dtype.itemsize for facts in items if facts is not None)


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


# --- proven, and in place ------------------------------------------------------------------------------------------


def _prove(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Read back what was written, from the disk where the system lets us ask it."""
    for name, file in files.items():
        if checksum(folder / name, file.bytes, from_disk=True) != file.sha256:
            raise OSError(errno.EIO, f"{name} was read back, and is not what was written")


def _put_in_place(folder: Path, home: Path, step: int) -> Path:
    """Under a name that nothing has, and for good; else not at all."""
    for path in _free_paths(home, step):
        try:
            folder.rename(path)
        except OSError:  # somebody was faster
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
    raise BadInput(f"{home} has {MOST_ATTEMPTS} checkpoints of step {step} already. Remove some.")


def _free_paths(home: Path, step: int) -> Iterator[Path]:
    paths = (home / folder_name(step, attempt) for attempt in range(1, MOST_ATTEMPTS + 1))
    return (path for path in paths if not os.path.lexists(path))

"""Write a checkpoint: into a temporary folder, verified and sealed, and only then renamed into place.

Rank 0 plans which rank writes what. Each rank then writes two files, and rank 0 the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.strict_json import refuse_many
from ampwise.guard.disk.catalog import (
    BEING_WRITTEN,
    SavedCheckpoint,
    checkpoint_from_manifest,
    checksum,
    next_number,
    sync_folder,
)
from ampwise.guard.disk.exchange import CheckpointRanks
from ampwise.guard.disk.manifest import (
    LARGEST_MANIFEST,
    LARGEST_PLAIN,
    LONGEST_NAME,
    MANIFEST,
    MOST_PARTS,
    MOST_RANKS,
    SEAL,
    CheckpointManifest,
    StoredFile,
    StoredTensor,
    TensorPiece,
    folder_name,
    plain_file,
    temporary_folder,
    tensors_file,
)
from ampwise.runs.files import write_atomically
from ampwise.runs.tensor_files import CODES, DTYPES, METADATA, refuse_unwritable, write_tensors

MOST_ATTEMPTS = 100_000  # at one step
SPARE_BYTES = 1_000_000  # bytes for the manifest and file system overhead
LONGEST_LABEL = 1000  # characters for a piece's offsets after its tensor's name


class LocalPiece(NamedTuple):
    """The part of a tensor that a rank has: all of it, or its shard."""

    name: str
    dtype: str  # as in the header of a file of tensors
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    alike: bool  # all ranks that have this part have the same values


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
    ranks = CheckpointRanks(group, f"a checkpoint of step {step} cannot be written to {home}")
    writer = _CheckpointWriter(home, step, ranks.rank)
    try:
        folder, keys = ranks.exchange(lambda: writer.check(live, staged, plain, frozenset(alike)), writer.plan)
        mine = {key: staged[name] for key, name in keys.items()}
        return ranks.exchange(lambda: writer.write(home / folder, mine), lambda files: writer.finish(files, about))
    finally:
        writer.clear()


class _CheckpointWriter:
    """The steps of writing a checkpoint: all ranks check and write; rank 0 plans before, and finishes after that."""

    def __init__(self, home: Path, step: int, rank: int) -> None:
        self._home, self._step, self._rank = home, step, rank
        self._plain = b""
        self._aside: Path | None = None  # temporary folder, only on rank 0
        self._planned: dict[str, StoredTensor] = {}

    def check(
        self, live: Mapping[str, Tensor], staged: Mapping[str, Tensor], plain: Any, alike: Collection[str]
    ) -> tuple[list[LocalPiece], int]:
        """Return the pieces that this rank has, and the size of its plain data."""
        _check(self._step, live, staged)
        try:
            self._plain = json.dumps(plain, allow_nan=False).encode()
            refuse_many(self._plain, MOST_PARTS)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"the plain data cannot be written as JSON: {error}.") from error
        size = len(self._plain)
        if size > LARGEST_PLAIN:
            raise BadInput(f"the plain data has {size:,} bytes as JSON; the limit is {LARGEST_PLAIN:,}.")
        pieces = [local_piece(name, tensor, alike=name in alike) for name, tensor in live.items()]
        for piece in pieces:
            found = tuple(staged[piece.name].shape)
            if found != piece.sizes:
                raise BadInput(f"{piece.name!r} is staged with shape {found}, expected {piece.sizes} on this rank.")
        return pieces, size

    def plan(self, everyone: Sequence[tuple[list[LocalPiece], int]]) -> list[tuple[str, dict[str, str]]]:
        """Create the folder; return its name and, for each rank, the tensors to write: key in the file, and name."""
        if len(everyone) > MOST_RANKS:
            raise BadInput(f"a checkpoint of {len(everyone)} ranks; the limit is {MOST_RANKS:,}.")
        self._planned = plan_pieces([pieces for pieces, _ in everyone])
        keys: dict[str, dict[str, str]] = {tensors_file(rank): {} for rank in range(len(everyone))}
        needed = SPARE_BYTES + sum(size for _, size in everyone)
        for name, tensor in self._planned.items():
            for piece in tensor.pieces:
                if keys[piece.file].setdefault(piece.key, name) != name:
                    raise BadInput("two tensors, or pieces of them, have the same name in a file.")
                needed += math.prod(piece.sizes) * DTYPES[tensor.dtype].itemsize
        self._home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._home).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs about {needed:,} bytes, and {free:,} are free")
        self._aside = temporary_folder(self._home, self._step, "new")
        BEING_WRITTEN.add(self._aside)
        self._aside.mkdir()
        return [(self._aside.name, keys[tensors_file(rank)]) for rank in range(len(everyone))]

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredFile]:
        """Write this rank's files, and read them back."""
        if not folder.is_dir():
            raise OSError(errno.ENOENT, f"{folder}, which rank 0 created, is not here: all ranks must share a disk")
        written = write_tensors(folder / tensors_file(self._rank), tensors)
        write_atomically(folder / plain_file(self._rank), [self._plain])
        files = {
            tensors_file(self._rank): StoredFile(written.size, written.sha256),
            plain_file(self._rank): StoredFile(len(self._plain), hashlib.sha256(self._plain).hexdigest()),
        }
        for name, file in files.items():
            if checksum(folder / name, file.bytes, from_disk=True) != file.sha256:
                raise OSError(errno.EIO, f"{name} differs from what was written when read back")
        sync_folder(folder)
        return files

    def finish(self, everyone: Sequence[dict[str, StoredFile]], about: Mapping[str, Any]) -> list[SavedCheckpoint]:
        """Write the manifest and rename the folder; return the checkpoint for each rank."""
        assert self._aside is not None
        files = {name: file for written in everyone for name, file in written.items()}
        number = next_number(self._home)
        manifest = CheckpointManifest(self._step, number, time.time(), len(everyone), dict(about), files, self._planned)
        text = manifest.text().encode()
        if len(text) > LARGEST_MANIFEST:
            raise BadInput(f"the manifest has {len(text):,} bytes; the limit is {LARGEST_MANIFEST:,}.")
        CheckpointManifest.parse(text)  # it must be readable
        write_atomically(self._aside / MANIFEST, [text])
        write_atomically(self._aside / SEAL, [f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()])
        sync_folder(self._aside)
        path = _put_in_place(self._aside, self._home, self._step)
        return [checkpoint_from_manifest(path, manifest)] * len(everyone)

    def clear(self) -> None:
        """Remove the temporary folder if it is still there: the checkpoint is incomplete then."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            BEING_WRITTEN.discard(self._aside)


# --- planning ------------------------------------------------------------------------------------------------------


def local_piece(name: str, tensor: Tensor, *, alike: bool = False) -> LocalPiece:
    """Return which part of a tensor this rank has."""
    shape, code = tuple(tensor.shape), CODES[tensor.dtype]
    if not hasattr(tensor, "__create_chunk_list__"):
        return LocalPiece(name, code, shape, (0,) * len(shape), shape, alike)
    (chunk,) = tensor.__create_chunk_list__()  # torch.distributed.checkpoint's own protocol for DTensors
    # A part of a DTensor that several ranks have is a replica.
    return LocalPiece(name, code, shape, tuple(chunk.offsets), tuple(chunk.sizes), True)


def plan_pieces(everyone: Sequence[Sequence[LocalPiece]]) -> dict[str, StoredTensor]:
    """Decide which rank writes each piece; given the pieces that each rank has, in rank order.

    Of ranks that have the same values, the one that has least to write so far writes them. Rank 0 writes tensors that
    may differ, such as running means, as DDP uses rank 0's; and single numbers, such as an optimizer's step counters:
    all ranks read them, and each rank reads every file that it needs completely.
    """
    holders: dict[LocalPiece, list[int]] = {}
    differing: set[str] = set()  # names of tensors that may differ: the first rank that has one writes it
    for rank, pieces in enumerate(everyone):
        for piece in pieces:
            # An empty shard has nothing to write, and its offsets may be those of another shard.
            is_empty_shard = math.prod(piece.sizes) == 0 < math.prod(piece.shape)
            if piece.name not in differing and not is_empty_shard:
                holders.setdefault(piece, []).append(rank)
        differing.update(piece.name for piece in pieces if not piece.alike)
    load = [0] * len(everyone)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    planned: dict[str, list[TensorPiece]] = {}
    for piece, ranks in holders.items():
        any_of_them = piece.alike and math.prod(piece.shape) > 1
        writer = min(ranks, key=lambda rank: (load[rank], rank)) if any_of_them else ranks[0]
        load[writer] += math.prod(piece.sizes) * DTYPES[piece.dtype].itemsize
        key = piece.name
        if piece.sizes != piece.shape:
            ranges = zip(piece.offsets, piece.sizes, strict=True)
            key += f" [{', '.join(f'{offset}:{offset + size}' for offset, size in ranges)}]"
        if kinds.setdefault(piece.name, (piece.dtype, piece.shape)) != (piece.dtype, piece.shape):
            raise BadInput(f"{piece.name!r} has another dtype or shape on rank {writer} than on others.")
        stored = TensorPiece(tensors_file(writer), key, piece.offsets, piece.sizes)
        planned.setdefault(piece.name, []).append(stored)
    return {name: StoredTensor(*kinds[name], tuple(pieces)) for name, pieces in planned.items()}


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


def _put_in_place(folder: Path, home: Path, step: int) -> Path:
    """Rename the folder to a free name and sync; undo the rename if the sync fails."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        path = home / folder_name(step, attempt)
        if os.path.lexists(path):
            continue
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

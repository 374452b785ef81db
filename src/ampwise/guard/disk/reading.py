"""Read a checkpoint into existing tensors, on any number of ranks. Reading runs no code from the checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ampwise.errors import BadInput
from ampwise.finding.strict_json import loads
from ampwise.guard.disk.catalog import DamagedCheckpoint, SavedCheckpoint, read_manifest, verify_file
from ampwise.guard.disk.layout import LARGEST_PLAIN, MOST_PARTS, plain_file
from ampwise.guard.disk.manifest import CheckpointManifest, StoredTensor, TensorPiece
from ampwise.guard.disk.rank_errors import checked_together, readable_error
from ampwise.runs.files import open_regular
from ampwise.runs.tensor_files import (
    DTYPES,
    INTEGER_BY_SIZE,
    TensorEntry,
    machine_memory,
    read_into_memory,
    tensor_entries,
)

__all__ = ["StoredTensorInfo", "read_into", "read_plain", "stored_tensors"]

SLAB = 64_000_000  # bytes read at a time, but at least one row


class StoredTensorInfo(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(checkpoint: SavedCheckpoint) -> dict[str, StoredTensorInfo]:
    """Return dtype and shape of each stored tensor; raise Damaged if the files are too short for them."""
    manifest = read_manifest(checkpoint.path)
    _check_against_files(checkpoint.path, manifest)
    return {name: StoredTensorInfo(_dtype(name, tensor), tensor.shape) for name, tensor in manifest.tensors.items()}


def read_plain(checkpoint: SavedCheckpoint, rank: int) -> Any:
    """Return a rank's plain state; if fewer ranks wrote the checkpoint, another rank's."""
    manifest = read_manifest(checkpoint.path)
    name = plain_file(rank % manifest.world_size)
    size = manifest.files[name].bytes
    if size > LARGEST_PLAIN:
        raise DamagedCheckpoint(f"{name} has {size:,} bytes; the limit is {LARGEST_PLAIN:,}.")
    verify_file(checkpoint.path, name, manifest)
    try:
        with open_regular(checkpoint.path / name, os.O_RDONLY, "rb") as file:
            return loads(file.read(size), most=MOST_PARTS)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {str(error)[:200]}.") from error


def read_into(checkpoint: SavedCheckpoint, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors in place on all ranks of the group; DTensors get their shard, even if it was sharded differently.

    Names, dtypes and shapes must match the checkpoint; BadInput names the first that does not. All ranks verify the
    checksums before any tensor is written, and raise Damaged if one differs.
    """
    reader = _CheckpointReader(checkpoint.path)
    what = f"{checkpoint.path} cannot be read"
    try:
        unused = set.intersection(*checked_together(group, lambda: reader.open_for(tensors)))
        if unused:
            raise BadInput(f"it has {min(unused)!r}, and there is no such tensor here.")
        _load(dict(tensors), reader, group)
    except (CheckpointException, Exception) as error:
        plain_error = readable_error(error, what, group)
        raise (DamagedCheckpoint(str(plain_error)) if isinstance(plain_error, OSError) else plain_error) from error


def _load(tensors: dict[str, Any], reader: StorageReader, group: dist.ProcessGroup | None) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if group is not None:
        load(tensors, storage_reader=reader, planner=planner, process_group=group)
        return
    # Without a group, as in writing.py.
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


# --- checks --------------------------------------------------------------------------------------------------------


def _dtype(name: str, tensor: StoredTensor) -> torch.dtype:
    if tensor.dtype not in DTYPES:
        raise BadInput(f"{name!r} has dtype {ascii(tensor.dtype)[:20]}; this torch supports {', '.join(DTYPES)}.")
    return DTYPES[tensor.dtype]


def _check_fit(manifest: CheckpointManifest, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name not in manifest.tensors:
            raise BadInput(f"{name!r} is not in the checkpoint.")
        stored = manifest.tensors[name]
        dtype = _dtype(name, stored)
        if dtype != tensor.dtype or stored.shape != tuple(tensor.shape):
            raise BadInput(
                f"{name!r} is {dtype} of shape {stored.shape} in the checkpoint, and {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} here."
            )


def _check_against_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Check the declared sizes against the files, and against this machine's memory."""
    largest = machine_memory()
    needed = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            needed[piece.file] += math.prod(piece.sizes) * _dtype(name, tensor).itemsize
    for file, size in needed.items():
        found = (folder / file).lstat().st_size if os.path.lexists(folder / file) else 0
        if found != manifest.files[file].bytes or size > found:
            raise DamagedCheckpoint(
                f"{file} has {found:,} bytes, and its tensors take {size:,}: it was truncated or changed."
            )
        if largest is not None and found > largest:
            raise BadInput(f"{file} has {found:,} bytes, and this machine has memory for {largest:,}.")


# --- reading -------------------------------------------------------------------------------------------------------


class _CheckpointReader(StorageReader):
    """Verifies the files that a rank needs during planning, so that no tensor is written before all are verified."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open_for(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Check everything but the files' contents; return the names of stored tensors that are not requested."""
        self._manifest = manifest = read_manifest(self._folder)
        _check_against_files(self._folder, manifest)
        _check_fit(manifest, tensors)
        self._pieces = {
            (name, piece.offsets): piece for name, tensor in manifest.tensors.items() for piece in tensor.pieces
        }
        return manifest.tensors.keys() - tensors.keys()

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # a reader belongs to one checkpoint

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({name: _metadata(tensor) for name, tensor in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        for file in sorted({self._piece(item.storage_index).file for item in plan.items}):
            verify_file(self._folder, file, self._manifest)
            with open_regular(self._folder / file, os.O_RDONLY, "rb") as opened_file:
                _check_header(tensor_entries(opened_file, file), file, self._manifest)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._piece(item.storage_index).file, []).append(item)
        for name, items in sorted(by_file.items()):
            with open_regular(self._folder / name, os.O_RDONLY, "rb") as file, torch.no_grad():
                places = tensor_entries(file, name)
                for item in items:
                    piece = self._piece(item.storage_index)
                    _fill(planner.resolve_tensor(item).detach(), file, places[piece.key], item, name)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _piece(self, index: MetadataIndex) -> TensorPiece:
        return self._pieces[index.fqn, tuple(index.offset or ())]


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks)


def _check_header(found: Mapping[str, TensorEntry], file: str, manifest: CheckpointManifest) -> None:
    """Check that a file holds exactly the tensors that the manifest lists."""
    expected = {
        piece.key: (DTYPES[tensor.dtype], piece.sizes)
        for tensor in manifest.tensors.values()
        for piece in tensor.pieces
        if piece.file == file
    }
    if expected != {name: (entry.dtype, entry.shape) for name, entry in found.items()}:
        raise DamagedCheckpoint(f"{file} holds other tensors than the manifest lists.")


def _fill(target: Tensor, file: IO[bytes], entry: TensorEntry, item: ReadItem, name: str) -> None:
    """Copy the requested part of a piece, some rows at a time."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if not math.prod(lengths):
        return
    if not entry.shape:
        _copy_bits(target, _read(file, entry, 0, (), name))
        return
    row = entry.dtype.itemsize * math.prod(entry.shape[1:])
    for first, count in _slabs(lengths[0], max(1, SLAB // row)):
        rows = _read(file, entry, (offsets[0] + first) * row, (count, *entry.shape[1:]), name)
        for dim in range(1, len(lengths)):
            rows = rows.narrow(dim, offsets[dim], lengths[dim])
        _copy_bits(target.narrow(0, first, count), rows)


def _slabs(rows: int, most: int) -> Iterator[tuple[int, int]]:
    return ((first, min(most, rows - first)) for first in range(0, rows, most))


def _read(file: IO[bytes], entry: TensorEntry, begin: int, shape: tuple[int, ...], name: str) -> Tensor:
    values = torch.empty(math.prod(shape) * entry.dtype.itemsize, dtype=torch.uint8)
    file.seek(entry.begin + begin)
    memory = values.numpy().data
    if read_into_memory(file, memory) != len(memory):
        raise DamagedCheckpoint(f"{name} was truncated while it was read.")
    if entry.dtype == torch.bool and int(values.max()) > 1:  # torch computes nonsense with other values
        raise DamagedCheckpoint(f"{name} is damaged: {entry.name[:80]!r} has bools that are neither 0 nor 1.")
    return values.view(entry.dtype).reshape(shape)


def _copy_bits(target: Tensor, values: Tensor) -> None:
    """Copy as integers, because copying floats may change the bits of a NaN."""
    number = INTEGER_BY_SIZE[values.dtype.itemsize]
    target.view(number).copy_(values.view(number))

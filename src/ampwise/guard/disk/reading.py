"""Read a checkpoint into existing tensors, on any number of ranks. Reading runs no code from the checkpoint.

Each rank reads each file that it needs once, and compares its checksum in the same pass. Values wait in host memory
until all ranks have verified theirs, so that a damaged checkpoint changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ampwise.errors import BadInput
from ampwise.finding.strict_json import loads
from ampwise.guard.disk.catalog import CHANGED, SavedCheckpoint, read_manifest
from ampwise.guard.disk.exchange import CheckpointNotSaved, CheckpointRanks
from ampwise.guard.disk.manifest import (
    LARGEST_PLAIN,
    MOST_PARTS,
    DamagedCheckpoint,
    StoredTensor,
    TensorPiece,
    plain_file,
)
from ampwise.guard.disk.writing import LocalPiece, local_piece
from ampwise.runs.files import open_regular
from ampwise.runs.tensor_files import DTYPES, INTEGER_BY_SIZE, machine_memory, read_tensors
from ampwise.trace.value_ranges import local_shard


class StoredTensorInfo(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Part(NamedTuple):
    """What a piece of a stored tensor and a tensor here have in common."""

    name: str
    piece: TensorPiece
    source: tuple[slice, ...]  # in the piece
    target: tuple[slice, ...]  # in this rank's tensor


class CheckpointReader:
    """Reads a checkpoint whose manifest is valid; raises Damaged for any other."""

    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        self._folder, self._manifest = checkpoint.path, read_manifest(checkpoint.path)

    def stored(self) -> dict[str, StoredTensorInfo]:
        """Return dtype and shape of each stored tensor; raise Damaged if the files are too short for them."""
        largest = machine_memory()
        needed = dict.fromkeys(self._manifest.files, 0)
        found = {}
        for name, tensor in self._manifest.tensors.items():
            if tensor.dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise BadInput(f"{name!r} has dtype {ascii(tensor.dtype)[:20]}; this torch supports {known}.")
            found[name] = StoredTensorInfo(DTYPES[tensor.dtype], tensor.shape)
            for piece in tensor.pieces:
                needed[piece.file] += math.prod(piece.sizes) * DTYPES[tensor.dtype].itemsize
        for file, size in needed.items():
            path, expected = self._folder / file, self._manifest.files[file].bytes
            length = path.lstat().st_size if os.path.lexists(path) else 0
            if length != expected or size > length:
                raise DamagedCheckpoint(
                    f"{file} has {length:,} bytes, and its tensors take {size:,}: it was truncated or changed."
                )
            if largest is not None and length > largest:
                raise BadInput(f"{file} has {length:,} bytes, and this machine has memory for {largest:,}.")
        return found

    def plain(self, rank: int) -> Any:
        """Return a rank's plain state; if fewer ranks wrote the checkpoint, another rank's."""
        name = plain_file(rank % self._manifest.world_size)
        expected = self._manifest.files[name]
        if expected.bytes > LARGEST_PLAIN:
            raise DamagedCheckpoint(f"{name} has {expected.bytes:,} bytes; the limit is {LARGEST_PLAIN:,}.")
        try:
            with open_regular(self._folder / name, os.O_RDONLY, "rb") as file:
                data = file.read(expected.bytes + 1)
            if len(data) != expected.bytes or hashlib.sha256(data).hexdigest() != expected.sha256:
                raise DamagedCheckpoint(f"{name} {CHANGED}.")
            return loads(data, most=MOST_PARTS)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{name} is missing.") from error
        except DamagedCheckpoint:
            raise
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {str(error)[:200]}.") from error

    def read_into(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Fill tensors in place on all ranks of the group; DTensors get their shard, however it was sharded before.

        Names, dtypes and shapes must match the checkpoint; BadInput names the first that does not. No tensor is written
        before all ranks have compared the checksums of their files; all raise Damaged if one differs.
        """
        ranks = CheckpointRanks(group, f"{self._folder} cannot be read")

        def check() -> set[str]:
            stored = self.stored()
            for name, tensor in tensors.items():
                if name not in stored:
                    raise BadInput(f"{name!r} is not in the checkpoint.")
                if stored[name] != (tensor.dtype, tuple(tensor.shape)):
                    raise BadInput(
                        f"{name!r} is {stored[name].dtype} of shape {stored[name].shape} in the checkpoint, and "
                        f"{tensor.dtype} of shape {tuple(tensor.shape)} here."
                    )
            return self._manifest.tensors.keys() - tensors.keys()

        def agree(everyone: Sequence[set[str]]) -> list[None]:
            if unused := set.intersection(*everyone):
                raise BadInput(f"it has {min(unused)!r}, and there is no such tensor here.")
            return [None] * len(everyone)

        values: list[tuple[_Part, Tensor]] = []
        try:
            ranks.exchange(check, agree)
            ranks.exchange(lambda: values.extend(self._values(tensors)), lambda everyone: everyone)
        except CheckpointNotSaved as error:
            raise DamagedCheckpoint(str(error)) from error
        with torch.no_grad():
            while values:  # each is freed when it is copied
                part, value = values.pop()
                target = local_shard(tensors[part.name]).detach()[part.target]
                number = INTEGER_BY_SIZE[value.dtype.itemsize]  # copying floats may change the bits of a NaN
                target.view(number).copy_(value.view(number))

    def _values(self, tensors: Mapping[str, Tensor]) -> list[tuple[_Part, Tensor]]:
        """Read this rank's part of all tensors, file by file, and compare checksums."""
        by_file: dict[str, list[_Part]] = {}
        for name, tensor in tensors.items():
            for part in _parts(local_piece(name, tensor), self._manifest.tensors[name]):
                by_file.setdefault(part.piece.file, []).append(part)
        values = []
        for file, parts in sorted(by_file.items()):
            try:
                found = read_tensors(self._folder / file, only={part.piece.key for part in parts})
            except BadInput as error:
                raise DamagedCheckpoint(str(error)) from error
            if found.sha256 != self._manifest.files[file].sha256:
                raise DamagedCheckpoint(f"{file} {CHANGED}.")
            for part in parts:
                value = found.tensors.get(part.piece.key)
                dtype = DTYPES[self._manifest.tensors[part.name].dtype]
                if value is None or (value.dtype, tuple(value.shape)) != (dtype, part.piece.sizes):
                    raise DamagedCheckpoint(f"{file} holds other tensors than the manifest lists.")
                needed = value[part.source]
                values.append((part, value if needed.shape == value.shape else needed.clone()))
        return values


def _parts(here: LocalPiece, stored: StoredTensor) -> list[_Part]:
    """Return what the pieces of a stored tensor have in common with the part of it that is here."""
    parts = []
    for piece in stored.pieces:
        source, target = [], []
        for there, size, own, own_size in zip(piece.offsets, piece.sizes, here.offsets, here.sizes, strict=True):
            begin, end = max(there, own), min(there + size, own + own_size)
            source.append(slice(begin - there, max(begin, end) - there))
            target.append(slice(begin - own, max(begin, end) - own))
        if all(each.stop > each.start for each in target):
            parts.append(_Part(here.name, piece, tuple(source), tuple(target)))
    return parts

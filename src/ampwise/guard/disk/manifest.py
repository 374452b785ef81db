"""The manifest of a checkpoint, which is validated completely before any other file is opened.

A manifest is untrusted. Only known file names are allowed, numbers must be numbers, and the pieces of each tensor must
cover it exactly, so that nothing is allocated or read that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps, loads
from ampwise.guard.disk.layout import (
    FORMAT,
    MANIFEST,
    MOST_PARTS,
    MOST_RANKS,
    RANK_FILE,
    VERSION,
    plain_file,
    tensors_file,
)

__all__ = ["CheckpointManifest", "DamagedCheckpoint", "StoredFile", "StoredTensor", "TensorPiece"]

MOST_CUTS = 64  # rounds of splitting the pieces of a tensor; shards need one for each dimension
MOST_DIMENSIONS = 64
MOST_VALUES = 2**56
LONGEST_NAME = 4096
LONGEST_NUMBER = 2**63
MOST_NUMBER = 2**53  # highest checkpoint number, far from the limit of an integer


class DamagedCheckpoint(BadInput):
    """Raised for a checkpoint that has changed since it was written; an older one may be intact."""


class TensorPiece(NamedTuple):
    """Rectangular part of a tensor, stored as a tensor in the file of one rank."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredTensor(NamedTuple):
    """Full tensor, made of the pieces of all ranks."""

    dtype: str  # as in the file's header: F32, BF16, ...
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


class StoredFile(NamedTuple):
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Contents of ``checkpoint.json``."""

    step: int
    number: int
    saved: float
    world_size: int
    about: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        count = len(self.files) // 2  # do not trust world_size yet
        expected = {name for rank in range(count) for name in (tensors_file(rank), plain_file(rank))}
        if count != self.world_size or self.files.keys() != expected:
            raise DamagedCheckpoint(
                f"{MANIFEST} is damaged: it does not name two files for each of {self.world_size} ranks."
            )
        for name, tensor in self.tensors.items():
            _check_pieces(name, tensor, self.files)

    def text(self) -> str:
        tensors = {
            name: {**tensor._asdict(), "pieces": [piece._asdict() for piece in tensor.pieces]}
            for name, tensor in self.tensors.items()
        }
        return dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "number": self.number,
                "saved": self.saved,
                "world_size": self.world_size,
                "about": self.about,
                "files": {name: file._asdict() for name, file in self.files.items()},
                "tensors": tensors,
            },
            indent=None,
        )

    @classmethod
    def parse(cls, data: bytes) -> CheckpointManifest:
        """Parse and validate a manifest; raise Damaged if it is invalid."""
        try:
            facts = loads(data, most=MOST_PARTS)
        except ValueError as error:
            raise DamagedCheckpoint(f"{MANIFEST} is damaged: {str(error)[:200]}.") from error
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{MANIFEST} is not an ampwise checkpoint manifest.")
        if facts.get("version") != VERSION:
            raise DamagedCheckpoint(
                f"{MANIFEST} has version {str(facts.get('version'))[:20]!r}; this ampwise reads version {VERSION}. "
                "Use the version of ampwise that wrote it."
            )
        try:
            return cls(
                step=_count(facts["step"]),
                number=_count(facts["number"], most=MOST_NUMBER),
                saved=_time(facts["saved"]),
                world_size=_count(facts["world_size"], 1, MOST_RANKS),
                about=_expect(dict, facts["about"]),
                files={name: _file(name, each) for name, each in _expect(dict, facts["files"]).items()},
                tensors={_name(name): _tensor(each) for name, each in _expect(dict, facts["tensors"]).items()},
            )
        except KeyError as error:
            raise DamagedCheckpoint(f"{MANIFEST} is damaged: {error.args[0]!r} is missing.") from error


# --- the parts -----------------------------------------------------------------------------------------------------


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: expected {kind.__name__}, got {ascii(value)[:40]}.")
    return value


def _count(value: Any, least: int = 0, most: int = LONGEST_NUMBER) -> int:
    count: int = _expect(int, value)
    if not least <= count <= most:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: invalid count {str(count)[:40]}.")
    return count


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_count(each) for each in _expect(list, value))


def _time(value: Any) -> float:
    time: float = value if isinstance(value, float) else float(_count(value))
    if not math.isfinite(time):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: invalid time {time}.")
    return time


def _name(value: Any) -> str:
    name: str = _expect(str, value)
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {ascii(name)[:80]} is not a valid tensor name.")
    return name


def _file(name: str, facts: Any) -> StoredFile:
    if not RANK_FILE.fullmatch(name):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {ascii(name)[:80]} is not a checkpoint file name.")
    facts = _fields(facts, StoredFile._fields)
    digest = _expect(str, facts["sha256"])
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {name} has no checksum.")
    return StoredFile(_count(facts["bytes"]), digest)


def _tensor(facts: Any) -> StoredTensor:
    facts = _fields(facts, StoredTensor._fields)
    pieces = tuple(_piece(each) for each in _expect(list, facts["pieces"]))
    return StoredTensor(_expect(str, facts["dtype"]), _counts(facts["shape"]), pieces)


def _piece(facts: Any) -> TensorPiece:
    facts = _fields(facts, TensorPiece._fields)
    return TensorPiece(
        _expect(str, facts["file"]), _name(facts["key"]), _counts(facts["offsets"]), _counts(facts["sizes"])
    )


def _fields(facts: Any, names: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = _expect(dict, facts)
    if found.keys() != set(names):
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: expected exactly the keys {', '.join(names)}.")
    return found


# --- pieces of a tensor --------------------------------------------------------------------------------------------


def _check_pieces(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """Check that the pieces are inside the tensor and in existing files, do not overlap, and cover it."""
    shown = f"{MANIFEST} is damaged: {ascii(name)[:80]}"
    shape = tensor.shape
    if len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) > MOST_VALUES:
        raise DamagedCheckpoint(f"{shown} has an invalid shape.")
    for piece in tensor.pieces:
        if piece.file not in files or not piece.file.endswith(".safetensors"):
            raise DamagedCheckpoint(
                f"{shown} refers to {ascii(piece.file)[:80]}, which is not one of its files of tensors."
            )
        if not _is_inside(piece, shape):
            raise DamagedCheckpoint(f"{shown} has a piece outside of its shape.")
    volume = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    if not tensor.pieces or volume != math.prod(shape) or _overlap([p for p in tensor.pieces if math.prod(p.sizes)]):
        raise DamagedCheckpoint(f"{shown} has pieces that overlap or do not cover it.")


def _is_inside(piece: TensorPiece, shape: Sequence[int]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    return all(offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.sizes, shape, strict=True))


def _overlap(pieces: Sequence[TensorPiece]) -> bool:
    """Whether two pieces may overlap: they cannot be separated by straight cuts, as shards can."""
    groups = [list(pieces)]
    for _ in range(MOST_CUTS):
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return False
        groups = [part for group in groups for part in _split_groups(group)]
    return True


def _split_groups(pieces: list[TensorPiece]) -> list[list[TensorPiece]]:
    """Split pieces into groups by straight cuts along the first dimension that allows one."""
    for dim in range(len(pieces[0].offsets)):
        groups: list[list[TensorPiece]] = []
        reached = -1
        for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
            if piece.offsets[dim] >= reached:
                groups.append([])
            groups[-1].append(piece)
            reached = max(reached, piece.offsets[dim] + piece.sizes[dim])
        if len(groups) > 1:
            return groups
    return [pieces]

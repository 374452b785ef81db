"""The files of a checkpoint: their names, and the manifest, which is validated before any other file is opened.

A manifest is untrusted. Only known file names are allowed, numbers must be numbers, and the pieces of each tensor must
cover it exactly, so that nothing is allocated or read that is not there.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps, loads

FORMAT = "ampwise-checkpoint"
VERSION = 3  # version 2 had two ways to store tensors in plain data
MANIFEST = "checkpoint.json"  # files, their sizes and checksums, and where each tensor is; written last
SEAL = "checkpoint.sha256"  # checksum of the manifest, in the format of sha256sum
MARK = "mark.json"  # added later: good, or not to be resumed
LOCK = "lock"  # next to the checkpoints: the run that writes here

LARGEST_MANIFEST = 64_000_000  # bytes; a model of a few hundred tensors takes about 100,000
LARGEST_PLAIN = 64_000_000
MOST_PARTS = 3_000_000  # lists and objects in either file: in memory they take many times their bytes
LARGEST_MARK = 10_000
MOST_RANKS = 100_000

FOLDER = re.compile(r"step-([0-9]{8,18})(?:-[0-9]{1,6})?")
LEFTOVER = re.compile(r"\.step-[0-9]{8,18}\.[0-9a-f]{8}\.(?:new|old)")
RANK_FILE = re.compile(r"tensors-[0-9]{5}\.safetensors|plain-[0-9]{5}\.json")
# Files that may be removed with a checkpoint; .new: its process was killed while writing it.
CHECKPOINT_FILE = re.compile(
    rf"(?:{RANK_FILE.pattern}|{re.escape(MANIFEST)}|{re.escape(SEAL)}|{re.escape(MARK)})(?:\.new)?"
)

MOST_CUTS = 64  # rounds of splitting the pieces of a tensor; shards need one for each dimension
MOST_DIMENSIONS = 64
MOST_VALUES = 2**56
LONGEST_NAME = 4096
LONGEST_NUMBER = 2**63
MOST_NUMBER = 2**53  # highest checkpoint number, far from the limit of an integer


def folder_name(step: int, attempt: int = 1) -> str:
    """Return the folder name of a checkpoint; a step that is repeated after a rollback has several attempts.

    >>> folder_name(100), folder_name(100, 2)
    ('step-00000100', 'step-00000100-2')
    """
    return f"step-{step:08d}" if attempt == 1 else f"step-{step:08d}-{attempt}"


def temporary_folder(directory: Path, step: int, ending: str) -> Path:
    """Return a temporary folder name: ending ``new`` for a checkpoint being written, ``old`` for one being removed."""
    return directory / f".{folder_name(step)}.{secrets.token_hex(4)}.{ending}"


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def plain_file(rank: int) -> str:
    return f"plain-{rank:05d}.json"


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
            saved = facts["saved"] if isinstance(facts["saved"], float) else float(_count(facts["saved"]))
            if not math.isfinite(saved):
                raise DamagedCheckpoint(f"{MANIFEST} is damaged: invalid time {saved}.")
            return cls(
                step=_count(facts["step"]),
                number=_count(facts["number"], most=MOST_NUMBER),
                saved=saved,
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
    pieces = []
    for each in _expect(list, facts["pieces"]):
        piece = _fields(each, TensorPiece._fields)
        file, key = _expect(str, piece["file"]), _name(piece["key"])
        pieces.append(TensorPiece(file, key, _counts(piece["offsets"]), _counts(piece["sizes"])))
    return StoredTensor(_expect(str, facts["dtype"]), _counts(facts["shape"]), tuple(pieces))


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
        ends = [offset + size for offset, size in zip(piece.offsets, piece.sizes, strict=False)]
        has_all = len(piece.offsets) == len(piece.sizes) == len(shape)
        if not has_all or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise DamagedCheckpoint(f"{shown} has a piece outside of its shape.")
    volume = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    if not tensor.pieces or volume != math.prod(shape) or _overlap([p for p in tensor.pieces if math.prod(p.sizes)]):
        raise DamagedCheckpoint(f"{shown} has pieces that overlap or do not cover it.")


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

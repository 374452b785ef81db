"""What a checkpoint says about itself: checked in full before anything else of it is opened.

A manifest may come from anybody. Names are confined to those that are ours, numbers are numbers, and the pieces of
each tensor fill it exactly, so that nobody allocates or reads what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ampwise.errors import BadInput
from ampwise.guard.disk.layout import (
    FORMAT,
    MANIFEST,
    MOST_PARTS,
    MOST_RANKS,
    OF_A_RANK,
    VERSION,
    plain_file,
    tensors_file,
)
from ampwise.strict_json import dumps, loads

__all__ = ["Damaged", "Manifest", "Piece", "StoredFile", "StoredTensor"]

MOST_CUTS = 64  # one after the other, that take the pieces of a tensor apart; shards need one for each dimension
MOST_DIMENSIONS = 64
MOST_VALUES = 2**56
LONGEST_NAME = 4096
LONGEST_NUMBER = 2**63
MOST_NUMBER = 2**53  # checkpoints: there is always one more


class Damaged(BadInput):
    """A checkpoint that is not as it was written; an older one may be."""


class Piece(NamedTuple):
    """A box of a tensor, and where it lies: a tensor in a file of one rank."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A whole tensor, as the ranks had it together."""

    dtype: str  # as in the header of the file: F32, BF16, ...
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class StoredFile(NamedTuple):
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is said in ``checkpoint.json``."""

    step: int
    number: int
    saved: float
    world_size: int
    about: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        count = len(self.files) // 2  # before names are made for as many ranks as it says
        expected = {name for rank in range(count) for name in (tensors_file(rank), plain_file(rank))}
        if count != self.world_size or self.files.keys() != expected:
            raise Damaged(f"{MANIFEST} is damaged: it does not name two files for each of {self.world_size} ranks.")
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
    def parse(cls, data: bytes) -> Manifest:
        """Damaged, in a line, for what no ampwise wrote."""
        try:
            facts = loads(data, most=MOST_PARTS)
        except ValueError as error:
            raise Damaged(f"{MANIFEST} is damaged: {str(error)[:200]}.") from error
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise Damaged(f"{MANIFEST} is of another kind.")
        if facts.get("version") != VERSION:
            raise Damaged(
                f"{MANIFEST} is of version {str(facts.get('version'))[:20]!r}, and this ampwise reads version "
                f"{VERSION}. Another version of ampwise wrote it: use that one."
            )
        try:
            return cls(
                step=_count(facts["step"]),
                number=_count(facts["number"], most=MOST_NUMBER),
                saved=_time(facts["saved"]),
                world_size=_count(facts["world_size"], 1, MOST_RANKS),
                about=_a(dict, facts["about"]),
                files={name: _file(name, each) for name, each in _a(dict, facts["files"]).items()},
                tensors={_name(name): _tensor(each) for name, each in _a(dict, facts["tensors"]).items()},
            )
        except KeyError as error:
            raise Damaged(f"{MANIFEST} is damaged: {error.args[0]!r} is missing.") from error


# --- the parts -----------------------------------------------------------------------------------------------------


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"{MANIFEST} is damaged: {ascii(value)[:40]} is there instead of a {kind.__name__}.")
    return value


def _count(value: Any, least: int = 0, most: int = LONGEST_NUMBER) -> int:
    count: int = _a(int, value)
    if not least <= count <= most:
        raise Damaged(f"{MANIFEST} is damaged: a count in it is {str(count)[:40]}.")
    return count


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_count(each) for each in _a(list, value))


def _time(value: Any) -> float:
    time: float = value if isinstance(value, float) else float(_count(value))
    if not math.isfinite(time):
        raise Damaged(f"{MANIFEST} is damaged: it was saved at {time}.")
    return time


def _name(value: Any) -> str:
    name: str = _a(str, value)
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise Damaged(f"{MANIFEST} is damaged: {ascii(name)[:80]} is no name for a tensor.")
    return name


def _file(name: str, facts: Any) -> StoredFile:
    if not OF_A_RANK.fullmatch(name):
        raise Damaged(f"{MANIFEST} is damaged: {ascii(name)[:80]} is no name of a file of ours.")
    facts = _fields(facts, StoredFile._fields)
    digest = _a(str, facts["sha256"])
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise Damaged(f"{MANIFEST} is damaged: {name} has no checksum.")
    return StoredFile(_count(facts["bytes"]), digest)


def _tensor(facts: Any) -> StoredTensor:
    facts = _fields(facts, StoredTensor._fields)
    pieces = tuple(_piece(each) for each in _a(list, facts["pieces"]))
    return StoredTensor(_a(str, facts["dtype"]), _counts(facts["shape"]), pieces)


def _piece(facts: Any) -> Piece:
    facts = _fields(facts, Piece._fields)
    return Piece(_a(str, facts["file"]), _name(facts["key"]), _counts(facts["offsets"]), _counts(facts["sizes"]))


def _fields(facts: Any, names: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = _a(dict, facts)
    if found.keys() != set(names):
        raise Damaged(f"{MANIFEST} is damaged: {', '.join(names)} are to be there, and nothing else.")
    return found


# --- pieces of a tensor --------------------------------------------------------------------------------------------


def _check_pieces(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """They lie in the tensor and in files that are there, none over another, and nothing is left out."""
    shown = f"{MANIFEST} is damaged: {ascii(name)[:80]}"
    shape = tensor.shape
    if len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) > MOST_VALUES:
        raise Damaged(f"{shown} has no shape that makes sense.")
    for piece in tensor.pieces:
        if piece.file not in files or not piece.file.endswith(".safetensors"):
            raise Damaged(f"{shown} is to lie in {ascii(piece.file)[:80]}, which is no file of tensors here.")
        if not _is_inside(piece, shape):
            raise Damaged(f"{shown} has a piece that lies outside of it.")
    volume = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    if not tensor.pieces or volume != math.prod(shape) or _overlap([p for p in tensor.pieces if math.prod(p.sizes)]):
        raise Damaged(f"{shown} has pieces that leave something out or lie over each other.")


def _is_inside(piece: Piece, shape: Sequence[int]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    return all(offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.sizes, shape, strict=True))


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two may lie over each other: no straight cuts take them all apart, as they do with any shards."""
    groups = [list(pieces)]
    for _ in range(MOST_CUTS):
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return False
        groups = [part for group in groups for part in _taken_apart(group)]
    return True


def _taken_apart(pieces: list[Piece]) -> list[list[Piece]]:
    """Groups with a straight cut between each and the next, along the first dimension that has one."""
    for dim in range(len(pieces[0].offsets)):
        groups: list[list[Piece]] = []
        reached = -1
        for piece in sorted(pieces, key=lambda piece: piece.offsets[dim]):
            if piece.offsets[dim] >= reached:
                groups.append([])
            groups[-1].append(piece)
            reached = max(reached, piece.offsets[dim] + piece.sizes[dim])
        if len(groups) > 1:
            return groups
    return [pieces]

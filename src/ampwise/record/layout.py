"""Which files a record is made of; making room for a new one, and for nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ampwise.errors import BadInput
from ampwise.record.files import ASIDE, read_json

__all__ = [
    "FILES",
    "FINDINGS",
    "FORMAT",
    "LARGEST_MANIFEST",
    "LAYERS",
    "MANIFEST",
    "STEPS",
    "VERSION",
    "is_rank_folder",
    "is_record",
    "make_room",
    "rank_folder",
    "rank_folders",
]

FORMAT = "ampwise-run"
VERSION = 1
MANIFEST, STEPS, LAYERS, FINDINGS = "manifest.json", "steps.jsonl", "layers.jsonl", "findings.json"
FILES = (STEPS, LAYERS, FINDINGS, MANIFEST)  # the manifest last: without it nobody knows the others for a record
LARGEST_MANIFEST = 4_000_000  # bytes; a real one has a few thousand


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank{rank}" if rank else folder


def rank_folders(folder: Path) -> dict[int, Path]:
    """Those that are there, by rank."""
    found = {_rank(path.name): path for path in folder.iterdir()}
    return {rank: found[rank] for rank in sorted(found) if rank}


def is_rank_folder(name: str) -> bool:
    """Whether a rank but the first writes to a folder of this name."""
    return _rank(name) > 0


def _rank(name: str) -> int:
    digits = name.removeprefix("rank")
    is_number = name.startswith("rank") and digits.isascii() and digits.isdigit() and len(digits) < 9
    return int(digits) if is_number and not digits.startswith("0") else 0


def is_record(folder: Path) -> bool:
    """Whether ampwise wrote it."""
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def make_room(folder: Path, *, rank: int = 0, world_size: int = 1, force: bool = False) -> Path:
    """The folder that a rank writes to, made, with nothing of an older record in it but a manifest to write over.

    Every rank looks after its own folder, since the others may be at work in theirs already; the first one also
    removes those of ranks that there no longer are.
    """
    own = rank_folder(folder, rank)
    if rank and own.is_symlink():
        raise BadInput(
            f"{own} is a link to another place, where no rank writes. Remove it, or -o names another folder."
        )
    for path in (folder, own):
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} is a file, and a record is a folder; -o names another.")
    if rank:
        _look_at_the_first(folder, world_size, force)
    own.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(own)
    stale = [] if rank else _ranks_from(folder, world_size)
    if not force and (is_record(own) or stale):
        raise BadInput(_HOLDS_A_RECORD.format(own))
    _clear(own, STEPS, LAYERS, FINDINGS)  # not the manifest, which says to the other ranks that this is a record
    for path in stale:
        _clear(path, *FILES)
        with contextlib.suppress(OSError):  # something else is in it, and stays
            path.rmdir()
    return own


_HOLDS_A_RECORD = "{} exists and holds a record; -f writes over it, -o names another."


def _look_at_the_first(folder: Path, world_size: int, force: bool) -> None:
    """Refuse what the first rank refuses; it may have made its record already, and have one of as many ranks."""
    if not folder.exists():
        return
    _refuse_foreign(folder)
    if is_record(folder) and not force and _world_size(folder) != world_size:
        raise BadInput(_HOLDS_A_RECORD.format(folder))


def _refuse_foreign(folder: Path) -> None:
    # In this order: the first thing that a rank at work beside this one leaves is the manifest.
    if _foreign(folder) and not is_record(folder):
        raise BadInput(
            f"{folder} is not empty and holds no record of ampwise, so that nothing in it is written over; "
            "-o names another folder."
        )


def _foreign(folder: Path) -> bool:
    """Whether it has anything but what a record that never came to its manifest has, or one whose ranks were faster."""
    ours = {name + ASIDE for name in FILES}
    # In one look, by names: a rank may make its folder at any moment.
    return any(path.name not in ours and not is_rank_folder(path.name) for path in folder.iterdir())


def _world_size(folder: Path) -> object:
    return read_json(folder / MANIFEST, LARGEST_MANIFEST).get("world_size")


def _clear(folder: Path, *names: str) -> None:
    for name in names:
        for path in (folder / (name + ASIDE), folder / name):
            if path.is_file() or path.is_symlink():
                path.unlink()


def _ranks_from(folder: Path, rank: int) -> list[Path]:
    """The records of ranks that a run of ``rank`` ranks does not have."""
    found = rank_folders(folder).items()
    return [path for number, path in found if number >= rank and not path.is_symlink() and is_record(path)]

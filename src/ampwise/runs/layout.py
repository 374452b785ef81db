"""Files of a record, and preparing a folder for a new one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ampwise.errors import BadInput
from ampwise.runs.files import TEMPORARY_SUFFIX, read_json

__all__ = [
    "EVENTS",
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
    "prepare_folder",
    "rank_folder",
    "rank_folders",
]

FORMAT = "ampwise-run"
VERSION = 1
MANIFEST, STEPS, LAYERS, FINDINGS = "manifest.json", "steps.jsonl", "layers.jsonl", "findings.json"
EVENTS = "events.jsonl"  # exists only if there were events
FILES = (STEPS, LAYERS, EVENTS, FINDINGS, MANIFEST)  # the manifest last: it identifies the folder as a record
LARGEST_MANIFEST = 4_000_000  # bytes; a typical one has a few thousand


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder that a rank writes to."""
    return folder / f"rank{rank}" if rank else folder


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks other than 0 that exist, by rank."""
    found = {_rank(path.name): path for path in folder.iterdir()}
    return {rank: found[rank] for rank in sorted(found) if rank}


def is_rank_folder(name: str) -> bool:
    """Whether this is the folder name of a rank other than 0."""
    return _rank(name) > 0


def _rank(name: str) -> int:
    digits = name.removeprefix("rank")
    is_number = name.startswith("rank") and digits.isascii() and digits.isdigit() and len(digits) < 9
    return int(digits) if is_number and not digits.startswith("0") else 0


def is_record(folder: Path) -> bool:
    """Whether a folder is a record that ampwise wrote."""
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def prepare_folder(folder: Path, *, rank: int = 0, world_size: int = 1, force: bool = False) -> Path:
    """Create the folder that a rank writes to, and remove an older record in it, except for its manifest.

    Every rank prepares its own folder, since others may already be writing theirs; rank 0 also removes the folders of
    ranks that no longer exist.
    """
    own = rank_folder(folder, rank)
    if rank and own.is_symlink():
        raise BadInput(
            f"{own} is a link, and records are not written through links. Remove it; -o names another folder."
        )
    for path in (folder, own):
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} is a file, and a record is a folder; -o names another.")
    if rank:
        _check_first_rank(folder, world_size, force)
    own.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(own)
    stale = [] if rank else _ranks_from(folder, world_size)
    if not force and (is_record(own) or stale):
        raise BadInput(_HOLDS_A_RECORD.format(own))
    _clear(own, STEPS, LAYERS, EVENTS, FINDINGS)  # not the manifest, which tells the other ranks that this is a record
    for path in stale:
        _clear(path, *FILES)
        with contextlib.suppress(OSError):  # other files in it are kept
            path.rmdir()
    return own


_HOLDS_A_RECORD = "{} already holds a record; -f overwrites it, -o names another folder."


def _check_first_rank(folder: Path, world_size: int, force: bool) -> None:
    """Refuse what rank 0 refuses; but it may already have created its record, with the same number of ranks."""
    if not folder.exists():
        return
    _refuse_foreign(folder)
    if is_record(folder) and not force and _world_size(folder) != world_size:
        raise BadInput(_HOLDS_A_RECORD.format(folder))


def _refuse_foreign(folder: Path) -> None:
    # In this order: the manifest is the first file that another rank writes.
    if _foreign(folder) and not is_record(folder):
        raise BadInput(
            f"{folder} is not empty and not an ampwise record, so it is not overwritten; -o names another folder."
        )


def _foreign(folder: Path) -> bool:
    """Whether a folder has files other than unfinished ones of a record and folders of other ranks."""
    ours = {name + TEMPORARY_SUFFIX for name in FILES}
    # By names, in one pass: another rank may create its folder at any moment.
    return any(path.name not in ours and not is_rank_folder(path.name) for path in folder.iterdir())


def _world_size(folder: Path) -> object:
    return read_json(folder / MANIFEST, LARGEST_MANIFEST).get("world_size")


def _clear(folder: Path, *names: str) -> None:
    for name in names:
        for path in (folder / (name + TEMPORARY_SUFFIX), folder / name):
            if path.is_file() or path.is_symlink():
                path.unlink()


def _ranks_from(folder: Path, rank: int) -> list[Path]:
    """Return the folders of ranks that a run of ``rank`` ranks does not have."""
    found = rank_folders(folder).items()
    return [path for number, path in found if number >= rank and not path.is_symlink() and is_record(path)]

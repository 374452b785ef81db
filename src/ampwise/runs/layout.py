"""The folder of a record: its files, preparing it for a new one, finding it, and guessing what is there instead."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from pathlib import Path

from ampwise.errors import BadInput
from ampwise.runs.files import TEMPORARY_SUFFIX, read_json

FORMAT = "ampwise-run"
VERSION = 1
MANIFEST, STEPS, LAYERS, FINDINGS = "manifest.json", "steps.jsonl", "layers.jsonl", "findings.json"
EVENTS = "events.jsonl"  # exists only if there were events
FILES = (STEPS, LAYERS, EVENTS, FINDINGS, MANIFEST)  # the manifest last: it identifies the folder as a record
LARGEST_MANIFEST = 4_000_000  # bytes; a typical one has a few thousand
RANK_FOLDER = re.compile(r"rank([1-9][0-9]{0,7})", re.ASCII)
MOST_NAMES = 10_000  # read from a folder that is not a record

# Descriptions, and the file names of other tools that they apply to.
OTHER_TOOLS = {
    "a TensorBoard log, which ampwise can write but not read": ("events.out.tfevents",),
    "a Weights & Biases log, which ampwise can write but not read": ("wandb", ".wandb"),
    "an MLflow log, which ampwise can write but not read": ("mlruns", "meta.yaml"),
    "an archive; unpack it, and name the folder": (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst"),
    "a checkpoint, which is not a record of the run": (".pt", ".pth", ".ckpt", ".safetensors", ".bin"),
}


def is_rank_folder(name: str) -> bool:
    """Whether this is the folder name of a rank other than 0."""
    return RANK_FOLDER.fullmatch(name) is not None


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks other than 0 that exist, by rank."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := RANK_FOLDER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def is_record(folder: Path) -> bool:
    """Whether a folder is a record that ampwise wrote."""
    try:
        manifest = read_json(folder / MANIFEST, LARGEST_MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


# --- preparing -----------------------------------------------------------------------------------------------------


def prepare_folder(folder: Path, *, rank: int = 0, world_size: int = 1, force: bool = False) -> Path:
    """Create the folder that a rank writes to, and remove an older record in it, except for its manifest.

    Every rank prepares its own folder, since others may already be writing theirs; rank 0 also removes the folders of
    ranks that no longer exist.
    """
    own = folder / f"rank{rank}" if rank else folder
    if rank and own.is_symlink():
        raise BadInput(
            f"{own} is a link, and records are not written through links. Remove it; -o names another folder."
        )
    for path in (folder, own):
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} is a file, and a record is a folder; -o names another.")
    holds_a_record = "{} already holds a record; -f overwrites it, -o names another folder."
    if rank and folder.exists():
        # Refuse what rank 0 refuses; but it may already have created its record, with the same number of ranks.
        _refuse_foreign(folder)
        refused = is_record(folder) and not force
        if refused and read_json(folder / MANIFEST, LARGEST_MANIFEST).get("world_size") != world_size:
            raise BadInput(holds_a_record.format(folder))
    own.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(own)
    others = {} if rank else rank_folders(folder)
    stale = [path for n, path in others.items() if n >= world_size and not path.is_symlink() and is_record(path)]
    if not force and (is_record(own) or stale):
        raise BadInput(holds_a_record.format(own))
    _remove(own, STEPS, LAYERS, EVENTS, FINDINGS)  # not the manifest, which tells the other ranks that this is a record
    for path in stale:
        _remove(path, *FILES)
        with contextlib.suppress(OSError):  # other files in it are kept
            path.rmdir()
    return own


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder with files other than unfinished ones of a record and folders of other ranks."""
    ours = {name + TEMPORARY_SUFFIX for name in FILES}
    # By names, in one pass: another rank may create its folder at any moment. The record is looked for last: its
    # manifest is the first file that another rank writes.
    foreign = any(path.name not in ours and not is_rank_folder(path.name) for path in folder.iterdir())
    if foreign and not is_record(folder):
        raise BadInput(
            f"{folder} is not empty and not an ampwise record, so it is not overwritten; -o names another folder."
        )


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        for path in (folder / (name + TEMPORARY_SUFFIX), folder / name):
            if path.is_file() or path.is_symlink():
                path.unlink()


# --- finding -------------------------------------------------------------------------------------------------------


def records_in(folder: Path) -> list[Path]:
    """Return the records in a folder, newest first: by start time, then by name."""

    def age(record: Path) -> tuple[str, str]:
        # The time in the manifest, which all records write in UTC: a copied record does not become newer.
        try:
            created = read_json(record / MANIFEST, LARGEST_MANIFEST).get("created")
        except (OSError, ValueError):  # it has just been removed
            created = None
        return (created if isinstance(created, str) else "", record.name)

    return sorted((folder / name for name in _names(folder) if is_record(folder / name)), key=age, reverse=True)


def newest_record(folder: Path) -> Path | None:
    """Return the record in a folder that started last; None if there is none."""
    return next(iter(records_in(folder)), None)


def why_not_a_record(path: Path) -> str:
    """Return a sentence about what is at a path that is not a readable record; empty if unknown."""
    if is_record(path):
        return ""  # the error already says why it cannot be read
    if path.is_file() and is_record(path.parent):
        return f"The record is its folder, {path.parent}."
    if records := records_in(path):
        many = f"{len(records):,} records" if len(records) > 1 else "a record"
        return f"It contains {many}: `ampwise report {records[0]}` shows the newest."
    names = _names(path)
    if MANIFEST + TEMPORARY_SUFFIX in names and MANIFEST not in names:
        return "A run is about to write a record here: try again in a moment."
    # Not resolved, because a link may point to itself.
    named = [os.path.basename(os.path.abspath(path)), *names]  # noqa: PTH100, PTH119
    for what, marks in OTHER_TOOLS.items():
        for name, mark in itertools.product(map(str.lower, named), marks):
            if name.endswith(mark) if mark.startswith(".") else name == mark or name.startswith(f"{mark}."):
                return f"It looks like {what}."
    return ""


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in itertools.islice(folder.iterdir(), MOST_NAMES)]
    except OSError:
        return []

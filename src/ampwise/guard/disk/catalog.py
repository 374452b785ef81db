"""List, verify, mark and prune the checkpoints in a directory. Needs no torch, and trusts nothing it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps, loads
from ampwise.finding.terminal import printable
from ampwise.guard.disk.durable_files import (
    checksum,
    holds_only_checkpoint_files,
    remove_checkpoint_folder,
    sync_folder,
)
from ampwise.guard.disk.layout import (
    CHECKPOINT_FILE,
    FOLDER,
    LARGEST_MANIFEST,
    LARGEST_MARK,
    LEFTOVER,
    MANIFEST,
    MARK,
    SEAL,
    plain_file,
    temporary_folder,
    tensors_file,
)
from ampwise.guard.disk.manifest import CheckpointManifest, DamagedCheckpoint
from ampwise.runs.files import open_regular, write_atomically

__all__ = [
    "DamagedCheckpoint",
    "SavedCheckpoint",
    "checkpoints",
    "clear_leftovers",
    "mark_bad",
    "mark_good",
    "next_number",
    "prune",
    "verify",
]

CHANGED = "has changed since it was written: its checksum differs"
LONGEST_REASON = 500
HIDDEN_BY_NFS = ".nfs"  # prefix that NFS gives a file that was removed while it was open
BEING_WRITTEN: set[Path] = set()  # folders this process is writing in the background: not leftovers


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint, as described by its manifest, file names and sizes."""

    path: Path
    step: int
    number: int  # order of saving; 0 if the manifest cannot be read
    saved: float  # Unix time, only for display: clocks can be set back
    bytes: int
    world_size: int
    about: Mapping[str, Any]
    good: bool  # the run was healthy for a while after it
    trouble: str  # why it must not be resumed, in one line; empty if it is complete
    undone: bool = False  # the run was rolled back to before it, which is its only trouble


# --- finding -------------------------------------------------------------------------------------------------------


def checkpoints(directory: str | Path) -> list[SavedCheckpoint]:
    """Return all checkpoints, newest first; damaged ones have ``trouble``. Empty if there is no directory."""
    home = Path(directory)
    try:
        names = os.listdir(home)  # noqa: PTH208
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{home} cannot be read: {error.strerror or error}. Name a folder of checkpoints.") from error
    found = [_checkpoint(home / name, int(match[1])) for name in names if (match := FOLDER.fullmatch(name))]
    return sorted(found, key=lambda each: (_order(each, found), each.step, each.path.name), reverse=True)


def next_number(directory: str | Path) -> int:
    """Return the number for a new checkpoint, higher than all existing ones."""
    return 1 + max((each.number for each in checkpoints(directory)), default=0)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; raise Damaged if its checksum differs or it is invalid."""
    data, seal = _bytes(folder, MANIFEST, LARGEST_MANIFEST), _bytes(folder, SEAL, 1000).split()
    if not seal or seal[0] != hashlib.sha256(data).hexdigest().encode():
        raise DamagedCheckpoint(f"{MANIFEST} {CHANGED}.")
    return CheckpointManifest.parse(data)


def checkpoint_from_manifest(
    folder: Path, manifest: CheckpointManifest, *, good: bool = False, trouble: str = "", undone: bool = False
) -> SavedCheckpoint:
    return SavedCheckpoint(
        path=folder,
        step=manifest.step,
        number=manifest.number,
        saved=manifest.saved,
        bytes=sum(file.bytes for file in manifest.files.values()),
        world_size=manifest.world_size,
        about=manifest.about,
        good=good,
        trouble=trouble,
        undone=undone,
    )


def _order(checkpoint: SavedCheckpoint, found: Sequence[SavedCheckpoint]) -> float:
    """Return the sort key of a checkpoint: its number, or a number derived from its step if that is unreadable."""
    if checkpoint.number:
        return checkpoint.number
    return max((each.number for each in found if each.step <= checkpoint.step), default=0) + 0.5


def _checkpoint(folder: Path, step: int) -> SavedCheckpoint:
    manifest, undone = None, False
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamagedCheckpoint("expected a folder, got a link or a file.")
        manifest = read_manifest(folder)
        _check_sizes(folder, manifest)
        good, trouble, undone = _mark(folder)
    except (DamagedCheckpoint, OSError) as error:
        good, trouble = False, printable(str(error))
    if manifest is None:
        return SavedCheckpoint(folder, step, 0, 0.0, 0, 0, {}, False, trouble)
    return checkpoint_from_manifest(folder, manifest, good=good, trouble=trouble, undone=undone)


def _check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    for name in os.listdir(folder):  # noqa: PTH208
        if not CHECKPOINT_FILE.fullmatch(name) and not name.startswith(HIDDEN_BY_NFS):
            raise DamagedCheckpoint(f"it contains {ascii(name)[:80]}, which is not a file of a checkpoint.")
    for name, file in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{name} is missing.") from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedCheckpoint(f"{name} is not a regular file.")
        if found.st_size != file.bytes:
            raise DamagedCheckpoint(
                f"{name} has {found.st_size:,} bytes, expected {file.bytes:,}: it was truncated or changed."
            )


def _bytes(folder: Path, name: str, largest: int) -> bytes:
    """Read a small file, after checking its size."""
    try:
        with open_regular(folder / name, os.O_RDONLY, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest:
                raise DamagedCheckpoint(f"{name} has {size:,} bytes; the limit is {largest:,}.")
            return file.read(size)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{name} is missing.") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror or error}.") from error


# --- verifying -----------------------------------------------------------------------------------------------------


def verify(checkpoint: SavedCheckpoint, *, share: int = 0, of: int = 1) -> None:
    """Read all files and compare their checksums; raise Damaged for the first that differs.

    share, of: rank and number of ranks that verify the checkpoint together. Each rank reads some of the files, and rank
    0 also checks all names and sizes. The checkpoint is complete if no rank raises.
    """
    manifest = read_manifest(checkpoint.path)
    if share == 0:
        _check_sizes(checkpoint.path, manifest)
    for rank in range(share, manifest.world_size, of):
        for name in (tensors_file(rank), plain_file(rank)):
            verify_file(checkpoint.path, name, manifest)


def verify_file(folder: Path, name: str, manifest: CheckpointManifest) -> None:
    """Compare the checksum of one file; raise Damaged if it differs."""
    file = manifest.files[name]
    try:
        found = checksum(folder / name, file.bytes)
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror or error}.") from error
    if found != file.sha256:
        raise DamagedCheckpoint(f"{name} {CHANGED}.")


# --- marking -------------------------------------------------------------------------------------------------------


def mark_good(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """Mark a checkpoint permanently as good: the run was healthy for a while after it. May raise OSError."""
    if checkpoint.trouble:
        raise BadInput(f"{checkpoint.path} cannot be marked as good: {checkpoint.trouble}")
    _write_mark(checkpoint, {"good": True, "why": ""})
    return dataclasses.replace(checkpoint, good=True)


def mark_bad(checkpoint: SavedCheckpoint, why: str, *, undone: bool = False) -> SavedCheckpoint:
    """Mark a checkpoint as one not to resume from. undone: because the run was rolled back to before it."""
    reason = printable(why)[:LONGEST_REASON] or "it was marked as not to be resumed."
    _write_mark(checkpoint, {"good": False, "why": reason, **({"undone": True} if undone else {})})
    return dataclasses.replace(checkpoint, good=False, trouble=reason, undone=undone)


def _write_mark(checkpoint: SavedCheckpoint, facts: Mapping[str, Any]) -> None:
    write_atomically(checkpoint.path / MARK, [dumps(facts).encode()])
    sync_folder(checkpoint.path)


def _mark(folder: Path) -> tuple[bool, str, bool]:
    """Return whether it is good, why it must not be resumed, and whether that is because it was undone."""
    if not os.path.lexists(folder / MARK):
        return False, "", False
    try:
        facts = loads(_bytes(folder, MARK, LARGEST_MARK))
    except ValueError as error:
        raise DamagedCheckpoint(f"{MARK} is damaged: {str(error)[:200]}") from error
    match facts:
        case {"good": True, "why": ""}:
            return True, "", False
        case {"good": False, "why": str(why)} if why:
            return False, printable(why)[:LONGEST_REASON], facts.get("undone") is True
    raise DamagedCheckpoint(f"{MARK} is damaged: expected good=true, or good=false and a reason.")


# --- pruning -------------------------------------------------------------------------------------------------------


def prune(directory: str | Path, keep: int, spared: Collection[Path] = ()) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints, and leftovers of failed writes; return what was removed.

    spared: further folders to keep, such as the checkpoint that is next to become good.

    The newest good checkpoint is always kept. Damaged checkpoints are removed if they are older than all that are kept
    and their manifest is readable. Folders with unknown files in them are not touched, and links are not followed.
    """
    if keep < 1:
        raise BadInput(f"prune(keep={keep}): expected 1 or more.")
    home = Path(directory)
    gone = clear_leftovers(home)
    outdated = [old for old in _to_prune(checkpoints(home), keep) if old.path not in spared]
    gone += [old.path for old in outdated if holds_only_checkpoint_files(old.path) and _remove(old)]
    if gone:
        with contextlib.suppress(OSError):  # a folder that reappears after a power cut is removed next time
            sync_folder(home)
    return gone


def clear_leftovers(directory: Path) -> list[Path]:
    """Remove leftovers of writes that were killed; return what was removed."""
    return [path for path in _leftovers(directory) if remove_checkpoint_folder(path)]


def _to_prune(found: Sequence[SavedCheckpoint], keep: int) -> Iterator[SavedCheckpoint]:
    whole = [each for each in found if not each.trouble]
    newest_good = next((each for each in whole if each.good), None)
    if len(whole) < keep:
        return
    oldest_kept = found.index(whole[keep - 1])
    for each in found[oldest_kept + 1 :]:
        if each is not newest_good and each.number:
            yield each


def _remove(checkpoint: SavedCheckpoint) -> bool:
    """Rename, then remove, so that a kill does not leave half a checkpoint under a valid name."""
    leaving = temporary_folder(checkpoint.path.parent, checkpoint.step, "old")
    try:
        checkpoint.path.rename(leaving)
    except OSError:
        return False
    remove_checkpoint_folder(leaving)
    return True


def _leftovers(home: Path) -> list[Path]:
    try:
        names = os.listdir(home)  # noqa: PTH208
    except OSError:
        return []
    return [home / name for name in sorted(names) if LEFTOVER.fullmatch(name) and home / name not in BEING_WRITTEN]

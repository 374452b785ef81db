"""List, verify, mark and prune the checkpoints in a directory. Needs no torch, and trusts nothing it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise.errors import BadInput
from ampwise.finding.strict_json import dumps, loads
from ampwise.finding.terminal import printable
from ampwise.guard.disk.manifest import (
    CHECKPOINT_FILE,
    FOLDER,
    LARGEST_MANIFEST,
    LARGEST_MARK,
    LEFTOVER,
    MANIFEST,
    MARK,
    SEAL,
    CheckpointManifest,
    DamagedCheckpoint,
    temporary_folder,
)
from ampwise.runs.files import open_regular, write_atomically

CHANGED = "has changed since it was written: its checksum differs"
LONGEST_REASON = 500
HIDDEN_BY_NFS = ".nfs"  # prefix that NFS gives a file that was removed while it was open
CHUNK = 4_000_000  # bytes read at a time
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EISDIR}  # file systems that cannot sync folders
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

    def order(checkpoint: SavedCheckpoint) -> float:
        """Return its number; if that is unreadable, one derived from its step."""
        before = (each.number for each in found if each.step <= checkpoint.step)
        return checkpoint.number or max(before, default=0) + 0.5

    return sorted(found, key=lambda each: (order(each), each.step, each.path.name), reverse=True)


def next_number(directory: str | Path) -> int:
    """Return the number for a new checkpoint, higher than all existing ones."""
    return 1 + max((each.number for each in checkpoints(directory)), default=0)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; raise Damaged if its checksum differs or it is invalid."""
    data, seal = _bytes(folder, MANIFEST, LARGEST_MANIFEST), _bytes(folder, SEAL, 1000).split()
    if not seal or seal[0] != hashlib.sha256(data).hexdigest().encode():
        raise DamagedCheckpoint(f"{MANIFEST} {CHANGED}.")
    return CheckpointManifest.parse(data)


def checkpoint_from_manifest(folder: Path, manifest: CheckpointManifest) -> SavedCheckpoint:
    size = sum(file.bytes for file in manifest.files.values())
    facts = manifest.step, manifest.number, manifest.saved, size, manifest.world_size, manifest.about
    return SavedCheckpoint(folder, *facts, good=False, trouble="")


def _checkpoint(folder: Path, step: int) -> SavedCheckpoint:
    found = SavedCheckpoint(folder, step, 0, 0.0, 0, 0, {}, good=False, trouble="")
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamagedCheckpoint("expected a folder, got a link or a file.")
        manifest = read_manifest(folder)
        found = checkpoint_from_manifest(folder, manifest)
        _check_sizes(folder, manifest)
        good, trouble, undone = _mark(folder)
    except (DamagedCheckpoint, OSError) as error:
        return dataclasses.replace(found, trouble=printable(str(error)))
    return dataclasses.replace(found, good=good, trouble=trouble, undone=undone)


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


def verify(checkpoint: SavedCheckpoint) -> None:
    """Read all files and compare their checksums; raise Damaged for the first that differs."""
    manifest = read_manifest(checkpoint.path)
    _check_sizes(checkpoint.path, manifest)
    for name, file in manifest.files.items():
        try:
            found = checksum(checkpoint.path / name, file.bytes)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror or error}.") from error
        if found != file.sha256:
            raise DamagedCheckpoint(f"{name} {CHANGED}.")


def checksum(path: Path, size: int, *, from_disk: bool = False) -> str:
    """Return the SHA-256 of a regular file of ``size`` bytes; raise OSError if it has another size.

    from_disk: drop the page cache first, so that the data is read from the disk.
    """
    digest, buffer, seen = hashlib.sha256(), memoryview(bytearray(min(CHUNK, max(size, 1)))), 0
    with open_regular(path, os.O_RDONLY, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise OSError(errno.EIO, f"it has {found:,} bytes, expected {size:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while seen <= size and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
            digest.update(buffer[:count])  # releases the GIL, as reading does
            seen += count
    return digest.hexdigest()


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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a file's fsync does not, and a power cut could undo a rename."""
    if os.name == "nt":  # folders cannot be synced
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


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
    found = checkpoints(home)
    whole = [each for each in found if not each.trouble]
    newest_good = next((each for each in whole if each.good), None)
    for old in found[found.index(whole[keep - 1]) + 1 :] if len(whole) >= keep else ():
        is_kept = old is newest_good or not old.number or old.path in spared
        if is_kept or not _holds_only_checkpoint_files(old.path):
            continue
        # Rename, then remove, so that a kill does not leave half a checkpoint under a valid name.
        leaving = temporary_folder(home, old.step, "old")
        try:
            old.path.rename(leaving)
        except OSError:
            continue
        _remove_folder(leaving)
        gone.append(old.path)
    if gone:
        with contextlib.suppress(OSError):  # a folder that reappears after a power cut is removed next time
            sync_folder(home)
    return gone


def clear_leftovers(directory: Path) -> list[Path]:
    """Remove leftovers of writes that were killed; return what was removed."""
    try:
        names = os.listdir(directory)  # noqa: PTH208
    except OSError:
        return []
    found = [directory / name for name in sorted(names) if LEFTOVER.fullmatch(name)]
    return [path for path in found if path not in BEING_WRITTEN and _remove_folder(path)]


def _holds_only_checkpoint_files(folder: Path) -> bool:
    """Whether this is a folder (not a link) that contains only checkpoint files."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
        return stat.S_ISDIR(folder.lstat().st_mode) and all(map(CHECKPOINT_FILE.fullmatch, names))
    except OSError:
        return False


def _remove_folder(folder: Path) -> bool:
    """Remove a folder if it contains only checkpoint files; return whether it is gone. Links are not followed."""
    if not _holds_only_checkpoint_files(folder):
        return False
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            path.unlink()
        folder.rmdir()
        return True
    return False

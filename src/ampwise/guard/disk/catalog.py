"""The checkpoints in a directory: found, proven, marked, pruned. Needs no torch, and believes nothing it reads."""

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
from ampwise.guard.disk.durable import checksum, holds_only_ours, remove_ours, sync_folder
from ampwise.guard.disk.layout import (
    FOLDER,
    LARGEST_MANIFEST,
    LARGEST_MARK,
    LEFTOVER,
    MANIFEST,
    MARK,
    OURS,
    SEAL,
    aside,
    plain_file,
    tensors_file,
)
from ampwise.guard.disk.manifest import Damaged, Manifest
from ampwise.printers.terminal import printable
from ampwise.record.files import opened, write_aside
from ampwise.strict_json import dumps, loads

__all__ = [
    "Checkpoint",
    "Damaged",
    "checkpoints",
    "clear_leftovers",
    "discredit",
    "next_number",
    "promote",
    "prune",
    "verify",
]

CHANGED = "is not as it was written: its checksum is another"
LONGEST_REASON = 500
HIDDEN_BY_NFS = ".nfs"  # how a file is called that was removed while somebody has it open
BEING_WRITTEN: set[Path] = set()  # by this process, in the background: no leftovers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as far as its manifest, names and sizes tell."""

    path: Path
    step: int
    number: int  # orders them; 0 where the manifest cannot be read
    saved: float  # Unix time, for people only: clocks are set back
    bytes: int
    world_size: int
    about: Mapping[str, Any]
    good: bool  # promoted: the run was healthy for a while after it
    trouble: str  # in a line, why not to go on from it; empty if it is whole
    undone: bool = False  # the run went back behind it: that is its only trouble


# --- finding -------------------------------------------------------------------------------------------------------


def checkpoints(directory: str | Path) -> list[Checkpoint]:
    """All there are, the newest first; damaged ones say what their trouble is. None where there is no directory."""
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
    """The number of a checkpoint that is newer than all there are."""
    return 1 + max((each.number for each in checkpoints(directory)), default=0)


def read_manifest(folder: Path) -> Manifest:
    """Damaged, in a line, where it is not what its seal was made for, or makes no sense."""
    data, seal = _bytes(folder, MANIFEST, LARGEST_MANIFEST), _bytes(folder, SEAL, 1000).split()
    if not seal or seal[0] != hashlib.sha256(data).hexdigest().encode():
        raise Damaged(f"{MANIFEST} {CHANGED}.")
    return Manifest.parse(data)


def described(
    folder: Path, manifest: Manifest, *, good: bool = False, trouble: str = "", undone: bool = False
) -> Checkpoint:
    return Checkpoint(
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


def _order(checkpoint: Checkpoint, all_of_them: Sequence[Checkpoint]) -> float:
    """The number; of one that has lost it, where its step would put it."""
    if checkpoint.number:
        return checkpoint.number
    return max((each.number for each in all_of_them if each.step <= checkpoint.step), default=0) + 0.5


def _checkpoint(folder: Path, step: int) -> Checkpoint:
    manifest, undone = None, False
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise Damaged("it is a link or a file, and no folder.")
        manifest = read_manifest(folder)
        _check_sizes(folder, manifest)
        good, trouble, undone = _mark(folder)
    except (Damaged, OSError) as error:
        good, trouble = False, printable(str(error))
    if manifest is None:
        return Checkpoint(folder, step, 0, 0.0, 0, 0, {}, False, trouble)
    return described(folder, manifest, good=good, trouble=trouble, undone=undone)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name in os.listdir(folder):  # noqa: PTH208
        if not OURS.fullmatch(name) and not name.startswith(HIDDEN_BY_NFS):
            raise Damaged(f"{ascii(name)[:80]} is in it, which is no file of a checkpoint.")
    for name, file in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing.") from error
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is not a plain file.")
        if found.st_size != file.bytes:
            raise Damaged(f"{name} has {found.st_size:,} bytes, not {file.bytes:,}: it was cut off or changed.")


def _bytes(folder: Path, name: str, largest: int) -> bytes:
    """A small file. Its length is asked first: memory is for what a checkpoint of ours may hold."""
    try:
        with opened(folder / name, os.O_RDONLY, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest:
                raise Damaged(f"{name} has {size:,} bytes, and {largest:,} is the most.")
            return file.read(size)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing.") from error
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror or error}.") from error


# --- proving -------------------------------------------------------------------------------------------------------


def verify(checkpoint: Checkpoint, *, share: int = 0, of: int = 1) -> None:
    """Read all of its files and compare their checksums; Damaged, in a line, for the first that is another.

    share, of: which of so many ranks this is, that prove it together. Each reads what some of those that wrote it have
    written, and the first looks at all names and lengths, too. It is whole if none of them finds anything.
    """
    manifest = read_manifest(checkpoint.path)
    if share == 0:
        _check_sizes(checkpoint.path, manifest)
    for rank in range(share, manifest.world_size, of):
        for name in (tensors_file(rank), plain_file(rank)):
            verify_file(checkpoint.path, name, manifest)


def verify_file(folder: Path, name: str, manifest: Manifest) -> None:
    """The same for one file."""
    file = manifest.files[name]
    try:
        found = checksum(folder / name, file.bytes)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror or error}.") from error
    if found != file.sha256:
        raise Damaged(f"{name} {CHANGED}.")


# --- marking -------------------------------------------------------------------------------------------------------


def promote(checkpoint: Checkpoint) -> Checkpoint:
    """Mark it as good, for good: the run was healthy for a while after it. OSError where that cannot be written."""
    if checkpoint.trouble:
        raise BadInput(f"{checkpoint.path} cannot be called good: {checkpoint.trouble}")
    _write_mark(checkpoint, {"good": True, "why": ""})
    return dataclasses.replace(checkpoint, good=True)


def discredit(checkpoint: Checkpoint, why: str, *, undone: bool = False) -> Checkpoint:
    """Mark it as one not to be resumed from. undone: because the run went back to a step before it."""
    reason = printable(why)[:LONGEST_REASON] or "it was marked as not to be resumed from."
    _write_mark(checkpoint, {"good": False, "why": reason, **({"undone": True} if undone else {})})
    return dataclasses.replace(checkpoint, good=False, trouble=reason, undone=undone)


def _write_mark(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    write_aside(checkpoint.path / MARK, [dumps(facts).encode()])
    sync_folder(checkpoint.path)


def _mark(folder: Path) -> tuple[bool, str, bool]:
    """Whether it is good, why it is not to be resumed from, and whether that is because it was undone."""
    if not os.path.lexists(folder / MARK):
        return False, "", False
    try:
        facts = loads(_bytes(folder, MARK, LARGEST_MARK))
    except ValueError as error:
        raise Damaged(f"{MARK} is damaged: {str(error)[:200]}") from error
    match facts:
        case {"good": True, "why": ""}:
            return True, "", False
        case {"good": False, "why": str(why)} if why:
            return False, printable(why)[:LONGEST_REASON], facts.get("undone") is True
    raise Damaged(f"{MARK} is damaged: it says neither that this is good nor why it is not.")


# --- pruning -------------------------------------------------------------------------------------------------------


def prune(directory: str | Path, keep: int, spared: Collection[Path] = ()) -> list[Path]:
    """Remove what is older than the ``keep`` newest whole ones, and what attempts left behind; returns what is gone.

    spared: folders that stay besides, such as that of the one that is next to become good.

    The newest good one stays in any case. Of damaged ones, those go whose manifest still says that they are ours, once
    they are older than all that is kept. Folders with other names in them are not touched, and links not followed.
    """
    if keep < 1:
        raise BadInput(f"prune(keep={keep}): at least one checkpoint has to stay.")
    home = Path(directory)
    gone = clear_leftovers(home)
    beyond = [old for old in _beyond(checkpoints(home), keep) if old.path not in spared]
    gone += [old.path for old in beyond if holds_only_ours(old.path) and _removed(old)]
    if gone:
        with contextlib.suppress(OSError):  # what comes back after a power cut is removed the next time
            sync_folder(home)
    return gone


def clear_leftovers(directory: Path) -> list[Path]:
    """Remove what attempts left behind that were killed; returns what is gone."""
    return [path for path in _leftovers(directory) if remove_ours(path)]


def _beyond(found: Sequence[Checkpoint], keep: int) -> Iterator[Checkpoint]:
    whole = [each for each in found if not each.trouble]
    newest_good = next((each for each in whole if each.good), None)
    if len(whole) < keep:
        return
    oldest_kept = found.index(whole[keep - 1])
    for each in found[oldest_kept + 1 :]:
        if each is not newest_good and each.number:
            yield each


def _removed(checkpoint: Checkpoint) -> bool:
    """Under another name first, so that a kill leaves no half of a checkpoint that looks like one."""
    leaving = aside(checkpoint.path.parent, checkpoint.step, "old")
    try:
        checkpoint.path.rename(leaving)
    except OSError:
        return False
    remove_ours(leaving)
    return True


def _leftovers(home: Path) -> list[Path]:
    try:
        names = os.listdir(home)  # noqa: PTH208
    except OSError:
        return []
    return [home / name for name in sorted(names) if LEFTOVER.fullmatch(name) and home / name not in BEING_WRITTEN]

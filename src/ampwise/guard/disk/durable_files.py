"""Durable files: sync folders, compute checksums, and remove checkpoint folders safely."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

from ampwise.guard.disk.layout import CHECKPOINT_FILE
from ampwise.runs.files import open_regular

__all__ = ["checksum", "holds_only_checkpoint_files", "remove_checkpoint_folder", "sync_folder"]

CHUNK = 4_000_000  # bytes read at a time
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EISDIR}  # file systems that cannot sync folders


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


def holds_only_checkpoint_files(folder: Path) -> bool:
    """Whether this is a folder (not a link) that contains only checkpoint files."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
        return stat.S_ISDIR(folder.lstat().st_mode) and all(map(CHECKPOINT_FILE.fullmatch, names))
    except OSError:
        return False


def remove_checkpoint_folder(folder: Path) -> bool:
    """Remove a folder if it contains only checkpoint files; return whether it is gone. Links are not followed."""
    if not holds_only_checkpoint_files(folder):
        return False
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            path.unlink()
        folder.rmdir()
        return True
    return False

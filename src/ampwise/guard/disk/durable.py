"""Files that a power cut leaves as they are: handed to the disk, read back, and folders removed without surprise."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

from ampwise.guard.disk.layout import OURS
from ampwise.record.files import opened

__all__ = ["checksum", "holds_only_ours", "remove_ours", "sync_folder"]

CHUNK = 4_000_000  # bytes that are read at a time
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EISDIR}  # systems that do not sync folders at all


def sync_folder(folder: Path) -> None:
    """Make the names in it last: a file's own fsync does not, and a rename without it may be undone."""
    if os.name == "nt":  # which has no such thing
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
    """The SHA-256 of a plain file that has ``size`` bytes; OSError where it has not, or is none.

    from_disk: what the system keeps in memory of it is dropped first, so that the disk itself is asked.
    """
    digest, buffer, seen = hashlib.sha256(), memoryview(bytearray(min(CHUNK, max(size, 1)))), 0
    with opened(path, os.O_RDONLY, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise OSError(errno.EIO, f"it has {found:,} bytes, not {size:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while seen <= size and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
            digest.update(buffer[:count])  # lets others run meanwhile, as reading does
            seen += count
    return digest.hexdigest()


def holds_only_ours(folder: Path) -> bool:
    """Whether it is a folder, no link to one, in which all names are those of files of ours."""
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and all(OURS.fullmatch(name) for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def remove_ours(folder: Path) -> bool:
    """Remove a folder of ours; whether it is gone. Names that are not ours stay, and links are not followed."""
    if not holds_only_ours(folder):
        return False
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            path.unlink()
        folder.rmdir()
        return True
    return False

"""Writing a file so that, whatever happens, either the old one is there or the new one."""
# ruff: noqa: PTH105

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from ampwise.source.script import Script, Unreadable, system_reason

__all__ = ["write_file", "write_script"]


def write_script(before: Script, text: str) -> None:
    """Write ``text`` as the code of the file that ``before`` was read from.

    Unreadable when that file is no longer what was read, or is in an encoding that would change the rest of it.
    """
    was = before.file_bytes(before.file_text(before.text))
    try:
        now = Path(before.path).read_bytes()
    except OSError as error:
        raise Unreadable(before.path, f"cannot be written: {system_reason(error)}") from error
    if now != was:
        raise Unreadable(
            before.path, f"not written: it has changed, or {before.encoding} does not give it back as it was"
        )
    write_file(before.path, before.file_bytes(before.file_text(text)))


def write_file(path: str, data: bytes) -> None:
    """Put ``data`` in the place of what ``path`` holds, with its mode and owner; a link stays a link."""
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    try:
        status = real.stat()
        if not os.access(real, os.W_OK):  # where the folder may be changed, a read-only file could be replaced
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        temporary.write_bytes(data)
        temporary.chmod(stat.S_IMODE(status.st_mode))
        with contextlib.suppress(OSError, AttributeError):  # only root may give a file away
            os.chown(temporary, status.st_uid, status.st_gid)
        os.replace(temporary, real)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise Unreadable(path, f"cannot be written: {system_reason(error)}") from error

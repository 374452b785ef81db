"""Writing a file so that, whatever happens, either the old one is there or the new one, and nothing else changes.

Every place where ``check`` writes uses it: ``--fix``, ``--add-noqa``, and the ``fix`` of an agent.
"""
# ruff: noqa: PTH100, PTH105, PTH108, PTH109, PTH118, PTH120

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from ampwise.source.script import Script, Unreadable, system_reason

__all__ = ["replace_file", "write_script"]

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
CHANGED = errno.ESTALE


def write_script(before: Script, text: str) -> None:
    """Write ``text`` as the code of the file that ``before`` was read from; a symlink stays one.

    Unreadable when that file lies elsewhere, is no longer what was read, or is in an encoding that would change the
    rest of it.
    """
    was = before.file_bytes(before.file_text(before.text))
    try:
        replace_file(_own_file(before.path), before.file_bytes(before.file_text(text)), was=was)
    except OSError as error:
        reason = f"cannot be written: {system_reason(error)}"
        if error.errno == CHANGED:
            reason = f"not written: it has changed, or {before.encoding} does not give it back as it was"
        raise Unreadable(before.path, reason) from error


def replace_file(path: str, data: bytes, *, was: bytes | None = None) -> None:
    """Put ``data`` in the place of a plain file, with its mode and owner, or make one; OSError when it cannot be.

    With ``was``, only a file that still holds that is replaced: another one is an OSError with ``errno.ESTALE``.
    """
    status = _plain_status(path, was)
    temporary = os.path.join(os.path.dirname(path), f".ampwise-{secrets.token_hex(8)}")
    # No name that anybody could have put a link at, and nobody else reads it before it has its mode.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600 if status else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if status is not None:
                _dress_as(file.fileno(), status)
            os.fsync(file.fileno())
        if was is not None and (status is None or _identity(os.lstat(path)) != _identity(status)):
            raise OSError(CHANGED, "it has changed")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _own_file(path: str) -> str:
    """The file that ``path`` leads to, which must lie below where we stand, or beside a path from elsewhere."""
    named, here = os.path.abspath(path), os.getcwd()
    is_below = named.startswith(os.path.join(here, "")) and here != os.path.dirname(here)  # all is below /
    root = os.path.realpath(here if is_below else os.path.dirname(named))
    real = os.path.realpath(named)
    if not real.startswith(os.path.join(root, "")):
        raise Unreadable(path, f"not written: a symlink that leads out of {root}; name the file itself: {real}")
    return real


def _plain_status(path: str, was: bytes | None) -> os.stat_result | None:
    """The status of a file that may be replaced; None where there is none yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW)
    except FileNotFoundError:
        if was is not None:
            raise
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if not os.access(path, os.W_OK):  # where the folder may be changed, a read-only file could be replaced
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if was is not None and file.read(len(was) + 1) != was:
            raise OSError(CHANGED, "it has changed")
    return status


def _dress_as(descriptor: int, status: os.stat_result) -> None:
    """Give a file the mode and owner of another; the bits of the mode that lend rights only with the owner."""
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "fchown"):
        try:
            os.fchown(descriptor, status.st_uid, status.st_gid)
        except PermissionError:  # only root may give a file away
            mode &= 0o777
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

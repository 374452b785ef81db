"""Replace a file atomically: after a crash, either the old or the new file is there.

Everything that ``check`` writes goes through it: ``--fix``, ``--add-noqa``, and an agent's ``fix``.
"""
# ruff: noqa: PTH100, PTH105, PTH108, PTH109, PTH118, PTH120

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from ampwise.check.source.script import SourceScript, UnreadableFile, os_error_reason

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
CHANGED = errno.ESTALE


def write_script(before: SourceScript, text: str) -> None:
    """Write ``text`` as the code of the file that ``before`` was read from; a symlink stays a symlink.

    UnreadableFile if the file is not below the current folder or, for other paths, below theirs, has changed since it
    was read, or cannot be written back in its encoding without other changes.
    """
    path, here = before.path, os.getcwd()
    named = os.path.abspath(path)
    is_below = named.startswith(os.path.join(here, "")) and here != os.path.dirname(here)  # everything is below /
    root = os.path.realpath(here if is_below else os.path.dirname(named))
    real = os.path.realpath(named)
    if not real.startswith(os.path.join(root, "")):
        raise UnreadableFile(path, f"not written: it is a symlink out of {root}; name the real file: {real}")
    was = before.file_bytes(before.file_text(before.text))
    try:
        replace_file(real, before.file_bytes(before.file_text(text)), was=was)
    except OSError as error:
        reason = f"cannot be written: {os_error_reason(error)}"
        if error.errno == CHANGED:
            reason = f"not written: the file has changed, or {before.encoding} cannot reproduce it exactly"
        raise UnreadableFile(path, reason) from error


def replace_file(path: str, data: bytes, *, was: bytes | None = None) -> None:
    """Replace a regular file by ``data``, keeping mode and owner, or create it; OSError if that fails.

    With ``was``, the file is replaced only if that is still its content; else OSError with ``errno.ESTALE``.
    """
    status = _plain_status(path, was)
    temporary = os.path.join(os.path.dirname(path), f".ampwise-{secrets.token_hex(8)}")
    # A name that cannot be guessed, so that no link can be there, and readable by nobody else until its mode is set.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600 if status else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if status is not None:
                _copy_mode_and_owner(file.fileno(), status)
            os.fsync(file.fileno())
        if was is not None and (status is None or _identity(os.lstat(path)) != _identity(status)):
            raise OSError(CHANGED, "the file has changed")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _plain_status(path: str, was: bytes | None) -> os.stat_result | None:
    """Return the status of a file that may be replaced; None if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW)
    except FileNotFoundError:
        if was is not None:
            raise
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if not os.access(path, os.W_OK):  # in a writable folder, even a read-only file could be replaced
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if was is not None and file.read(len(was) + 1) != was:
            raise OSError(CHANGED, "the file has changed")
    return status


def _copy_mode_and_owner(descriptor: int, status: os.stat_result) -> None:
    """Copy mode and owner to a file; setuid and setgid bits only if the owner could be set."""
    mode = stat.S_IMODE(status.st_mode)
    if hasattr(os, "fchown"):
        try:
            os.fchown(descriptor, status.st_uid, status.st_gid)
        except PermissionError:  # only root may change the owner
            mode &= 0o777
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

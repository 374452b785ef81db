"""The process of one request: it looks at what the agent named, and then is the command that was asked for.

All that may take long is done here, where it can be stopped: looking at paths, walking folders, reading settings.
"""
# ruff: noqa: PTH100, PTH115, PTH118, PTH120

from __future__ import annotations

import builtins
import errno
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ampwise.cli import script
from ampwise.errors import BadInput
from ampwise.integrations.mcp_folder import Folder, Named
from ampwise.printers.terminal import say

__all__ = ["keep_inside", "main"]


def main() -> NoReturn:
    """Read the request from stdin, as ``mcp_process`` writes it, and run it in the current folder."""
    request = json.loads(sys.stdin.buffer.read())
    if request["text"] is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(request["text"].encode("utf-8", "surrogatepass")), encoding="utf-8")
    sys.path.insert(0, os.path.dirname(sys.executable))  # which `ampwise run` puts the script's folder in the place of
    try:
        folder = Folder(".")
        if not request["own_code"]:
            keep_inside(str(folder.root))
        words = [word if isinstance(word, str) else Named(**word) for word in request["words"]]
        sys.argv = ["ampwise", *folder.words(words)]
        script()
    except BadInput as error:
        say("ampwise: error: {}", error)
    except RecursionError:
        say("ampwise: error: a file is nested too deeply to be read.")
    sys.exit(2)


def keep_inside(root: str) -> None:
    """From now on, refuse to open what has a path in the folder but lies elsewhere, for the rest of this process.

    What the agent named was looked at already. This is for files that nobody named, and for a symlink that was put in
    the place of a file since: where an open file lies, nobody can change. Python's own modules may be symlinks, also
    where its environment is in the folder.
    """
    top = os.path.join(root, "")
    installed = tuple(os.path.join(each, "") for each in (sys.prefix, sys.base_prefix))

    def see(real: str, path: str) -> None:
        if not real.startswith(top):
            raise PermissionError(errno.EACCES, f"leads out of {root}", path)

    def kept(open_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(open_)
        def opened(file: Any, *arguments: Any, **options: Any) -> Any:
            path = "" if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
            if not path.startswith(top) or path.startswith(installed):
                return open_(file, *arguments, **options)
            see(os.path.realpath(path), path)  # before a file elsewhere is emptied
            found = open_(file, *arguments, **options)
            try:
                see(_lies_at(found if isinstance(found, int) else found.fileno(), path), path)
            except PermissionError:
                os.close(found) if isinstance(found, int) else found.close()
                raise
            return found

        return opened

    for module in (builtins, io, os):
        setattr(module, "open", kept(module.open))  # noqa: B010 (mypy would have it of the same type)


def _lies_at(descriptor: int, path: str) -> str:
    """The path of an open file; of what the path leads to now, where the system does not tell."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)


if __name__ == "__main__":
    main()

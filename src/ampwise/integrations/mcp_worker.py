"""The process of one request: it checks the paths that the agent named, then runs the command.

Everything that may take long is done here, where it can be stopped: resolving paths, walking folders, reading settings.
"""
# ruff: noqa: PTH100, PTH115, PTH118, PTH120

from __future__ import annotations

import builtins
import errno
import functools
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ampwise.errors import BadInput
from ampwise.finding.terminal import say
from ampwise.integrations.mcp_folder import AgentFolder, NamedPath

__all__ = ["keep_inside", "main"]


def main() -> NoReturn:
    """Read the request from stdin, as ``mcp_process`` writes it, and run it in the current folder."""
    request = json.loads(sys.stdin.buffer.read())
    if request["text"] is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(request["text"].encode("utf-8", "surrogatepass")), encoding="utf-8")
    sys.path.insert(0, os.path.dirname(sys.executable))  # `ampwise run` replaces it by the script's folder
    try:
        folder = AgentFolder(".")
        if not request["own_code"]:
            keep_inside(str(folder.root))
        words = [word if isinstance(word, str) else NamedPath(**word) for word in request["words"]]
        sys.argv = ["ampwise", *folder.words(words)]
        importlib.import_module("ampwise.cli").script()  # by name: the command line is built on this package
    except BadInput as error:
        say("ampwise: error: {}", error)
    except RecursionError:
        say("ampwise: error: a file is nested too deeply to be read.")
    sys.exit(2)


def keep_inside(root: str) -> None:
    """Make this process refuse to open any path in the folder that leads out of it.

    Paths that the agent named were checked before. This covers files that it did not name, and symlinks that replaced a
    file since: the path of an open file cannot be changed. Python's own modules are exempt, since they may be symlinks
    even if the environment is in the folder.
    """
    top = os.path.join(root, "")
    installed = tuple(os.path.join(each, "") for each in (sys.prefix, sys.base_prefix))

    def check_inside(real: str, path: str) -> None:
        if not real.startswith(top):
            raise PermissionError(errno.EACCES, f"leads out of {root}", path)

    def checked(open_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(open_)
        def opened(file: Any, *arguments: Any, **options: Any) -> Any:
            path = "" if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
            if not path.startswith(top) or path.startswith(installed):
                return open_(file, *arguments, **options)
            check_inside(os.path.realpath(path), path)  # before opening could truncate a file elsewhere
            found = open_(file, *arguments, **options)
            try:
                check_inside(_path_of(found if isinstance(found, int) else found.fileno(), path), path)
            except PermissionError:
                os.close(found) if isinstance(found, int) else found.close()
                raise
            return found

        return opened

    for module in (builtins, io, os):
        setattr(module, "open", checked(module.open))  # noqa: B010 (mypy would have it of the same type)


def _path_of(descriptor: int, path: str) -> str:
    """Return the path of an open file or, if the system does not tell, where ``path`` leads now."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)


if __name__ == "__main__":
    main()

"""The process of one request of an agent: it checks the paths that the agent named, then runs the command.

An agent may read one folder: any path outside of it, symlinks followed, is refused. Everything that may take long is
done here, where it can be stopped: resolving paths, walking folders, reading settings.
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
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ampwise.check.config import OWN_FILE, PROJECT_FILE, SettingsByFolder
from ampwise.check.files import DEFAULT_EXCLUDE, SUFFIXES, is_excluded
from ampwise.check.source.script import LARGEST_BYTES, LARGEST_NOTEBOOK_BYTES, NOTEBOOK
from ampwise.errors import BadInput
from ampwise.finding.terminal import printable, say

MOST_FILES = 2000  # in one call: more would take minutes
MOST_ENTRIES = 20_000  # directory entries that are read to find them
MOST_NAMES = 100  # files and folders in one call, each of which may be walked
LONGEST_NAME = 1000


@dataclass(frozen=True, slots=True)
class NamedPath:
    """Path that an agent names; it becomes words of a command line once it is checked.

    ``before`` is put before each word: an option, such as ``--output=``.
    """

    kind: Literal["file", "folder", "new", "maker", "scripts", "settings"]
    names: Sequence[str] = ()
    before: str = ""


Word = str | NamedPath


class AgentFolder:
    """Folder that an agent may read; ``root`` is its real path.

    Checking a path may take long (a slow disk, a huge folder), so the process of the request does it, not the server.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._checked: set[Path] = set()  # folders whose settings files were checked
        if not self.root.is_dir():
            raise BadInput(f"--root {printable(str(root))}: no such folder.")
        if self.root == self.root.parent:
            raise BadInput(f"{self.root}: an agent would see the whole machine; name a folder with --root FOLDER.")

    def words(self, words: Iterable[Word]) -> list[str]:
        """Return a command line with all paths checked; BadInput for a path outside of the folder."""
        return [each for word in words for each in ([word] if isinstance(word, str) else self._paths(word))]

    def file(self, name: str) -> str:
        """Return a file in the folder as a relative path that cannot be taken for an option."""
        path = self._inside(name)
        status = _status(name, path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "something else"
            raise BadInput(f"{_shown(name)}: expected a file, got {kind}.")
        largest = LARGEST_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else LARGEST_BYTES
        if status.st_size > largest:
            raise BadInput(f"{_shown(name)}: larger than {largest // 1_000_000} MB, which is too large for a script.")
        return self._relative(path)

    def folder(self, name: str) -> str:
        """Return a folder in the folder that contains no symlink that leads out."""
        path = self._inside(name)
        mode = _status(name, path).st_mode
        if not stat.S_ISDIR(mode):
            kind = "a file" if stat.S_ISREG(mode) else "something else"
            raise BadInput(f"{_shown(name)}: expected a folder, got {kind}.")
        for entry in self._entries(name, path):
            real = self._inside(str(entry))
            if not real.exists():
                continue
            mode = _status(str(entry), real).st_mode
            if not stat.S_ISREG(mode) and (entry.is_symlink() or not stat.S_ISDIR(mode)):
                raise BadInput(
                    f"{_shown(self._relative(entry))}: expected a file or a folder, got a pipe, a device or a symlink "
                    "to a folder."
                )
        return self._relative(path)

    def new(self, name: str) -> str:
        """Return a path in the folder where a new file or folder may be made."""
        return self._relative(self._inside(name))

    def scripts(self, names: Sequence[str]) -> list[str]:
        """Return the scripts and notebooks in files and folders, without what the settings exclude from folders.

        Symlinks in folders are not followed.
        """
        found: dict[str, None] = {}
        configs = SettingsByFolder()
        if len(names) > MOST_NAMES:
            raise BadInput(f"paths: expected at most {MOST_NAMES}, got {len(names)}. Name the folder they are in.")
        for name in dict.fromkeys(names):
            for each in self._scripts(name, configs):
                found[each] = None
                if len(found) > MOST_FILES:
                    raise BadInput(f"{_shown(name)}: more than {MOST_FILES} files; name a folder below it.")
        if not found:
            raise BadInput(f"{_shown(', '.join(names))}: no Python file or notebook there that is not excluded.")
        return list(found)

    def settings(self, folder: Path | None = None) -> None:
        """Refuse settings files that are symlinks leading out, in a folder and in those above it up to the root."""
        here = folder or self.root
        while here not in self._checked:
            for name in (OWN_FILE, PROJECT_FILE):
                if (here / name).is_symlink():
                    self._inside(str(here / name))
            self._checked.add(here)
            here = self.root if here == self.root else here.parent

    def maker(self, name: str) -> str:
        """Return ``train:make`` unchanged, ``train.py:make`` with its file checked."""
        place, colon, function = name.rpartition(":")
        if name.startswith("-") or not colon or not function.isidentifier():
            raise BadInput(f"{_shown(name)}: expected a function of yours, such as train.py:make.")
        return f"{self.file(place)}:{function}" if place.endswith(".py") else name

    def _paths(self, named: NamedPath) -> list[str]:
        if named.kind == "scripts":
            return self.scripts(named.names)
        if named.kind == "settings":
            self.settings()
            return []
        look = {"file": self.file, "folder": self.folder, "new": self.new, "maker": self.maker}[named.kind]
        return [f"{named.before}{look(name)}" for name in named.names]

    def _scripts(self, name: str, configs: SettingsByFolder) -> Iterator[str]:
        path = self._inside(name)
        if not stat.S_ISDIR(_status(name, path).st_mode):
            script = self.file(name)
            self.settings(path.parent)
            yield script
            return
        for entry in self._entries(name, path, DEFAULT_EXCLUDE):
            if entry.suffix in SUFFIXES and not entry.is_symlink() and entry.is_file():
                self.settings(entry.parent)
                # The default exclusions were applied while walking.
                has_settings = configs.for_file(str(entry)).source is not None
                if not (has_settings and is_excluded(str(entry), configs)):
                    yield self._relative(entry)

    def _entries(self, name: str, path: Path, exclude: Sequence[str] = ()) -> Iterator[Path]:
        """Yield everything below a folder; symlinks are not followed.

        Entries are counted while they are read, so that a folder with millions of them is not read into memory.
        """
        seen, pending = 0, [path]
        while pending:
            here: list[tuple[str, bool]] = []
            for entry in _scanned(pending.pop()):
                seen += 1
                if seen > MOST_ENTRIES:
                    raise BadInput(f"{_shown(name)}: more than {MOST_ENTRIES} entries; name a folder below it.")
                is_folder = entry.is_dir(follow_symlinks=False)
                if not (is_folder and entry.name in exclude):
                    here.append((entry.path, is_folder))
            here.sort()
            pending += [Path(each) for each, is_folder in reversed(here) if is_folder]
            yield from (Path(each) for each, _ in here)

    def _inside(self, name: str) -> Path:
        """Return the real path, which need not exist; a path outside is refused without revealing whether it exists."""
        if not name.strip() or "\0" in name or len(name) > LONGEST_NAME:
            raise BadInput(f"{_shown(name)}: expected the name of a file or folder.")
        try:
            path = (self.root / name).resolve()
        except (OSError, RuntimeError, UnicodeError) as error:  # a loop of symlinks, or an invalid name
            raise BadInput(f"{_shown(name)}: cannot be resolved: {printable(str(error))}.") from None
        if not path.is_relative_to(self.root):
            raise BadInput(f"{_shown(name)}: outside of {self.root}, where ampwise mcp was started. Name a path in it.")
        return path

    def _relative(self, path: Path) -> str:
        return os.path.join(".", path.relative_to(self.root))


def _scanned(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder as they are read; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _status(name: str, path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise BadInput(f"{_shown(name)}: {(error.strerror or 'cannot be read').lower()}.") from None


def _shown(name: str) -> str:
    return printable(name[:200]) or "''"


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

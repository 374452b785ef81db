"""The folder that an agent may read: any path outside of it, symlinks followed, is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ampwise.check.config import OWN_FILE, PROJECT_FILE, SettingsByFolder
from ampwise.check.files import DEFAULT_EXCLUDE, SUFFIXES, is_excluded
from ampwise.check.source.script import LARGEST_BYTES, LARGEST_NOTEBOOK_BYTES, NOTEBOOK
from ampwise.errors import BadInput
from ampwise.finding.terminal import printable

__all__ = ["AgentFolder", "NamedPath", "Word"]

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
        mode = self._status(name, path)
        if not stat.S_ISREG(mode):
            raise BadInput(f"{_shown(name)}: expected a file, got {_kind(mode)}.")
        largest = LARGEST_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else LARGEST_BYTES
        if path.stat().st_size > largest:
            raise BadInput(f"{_shown(name)}: larger than {largest // 1_000_000} MB, which is too large for a script.")
        return self._relative(path)

    def folder(self, name: str) -> str:
        """Return a folder in the folder that contains no symlink that leads out."""
        path = self._inside(name)
        mode = self._status(name, path)
        if not stat.S_ISDIR(mode):
            raise BadInput(f"{_shown(name)}: expected a folder, got {_kind(mode)}.")
        for entry in self._entries(name, path):
            self._refuse_unsafe(entry)
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
        """Return ``module:function`` unchanged, ``file.py:function`` with its file checked."""
        place, colon, function = name.rpartition(":")
        if name.startswith("-") or not colon or not function.isidentifier():
            raise BadInput(f"{_shown(name)}: expected module:function or file.py:function, such as train:make.")
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
        if not stat.S_ISDIR(self._status(name, path)):
            script = self.file(name)
            self.settings(path.parent)
            yield script
            return
        for entry in self._entries(name, path, DEFAULT_EXCLUDE):
            if entry.suffix in SUFFIXES and not entry.is_symlink() and entry.is_file():
                self.settings(entry.parent)
                if not _is_excluded_by_settings(entry, configs):
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

    def _refuse_unsafe(self, entry: Path) -> None:
        """Refuse a symlink that leads out or to a folder, a pipe and a device."""
        path = self._inside(str(entry))
        if not path.exists():
            return
        mode = self._status(str(entry), path)
        if not stat.S_ISREG(mode) and (entry.is_symlink() or not stat.S_ISDIR(mode)):
            raise BadInput(
                f"{_shown(self._relative(entry))}: expected a file or a folder, got a pipe, a device or a symlink to a "
                "folder."
            )

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

    def _status(self, name: str, path: Path) -> int:
        try:
            return path.stat().st_mode
        except OSError as error:
            raise BadInput(f"{_shown(name)}: {(error.strerror or 'cannot be read').lower()}.") from None

    def _relative(self, path: Path) -> str:
        return os.path.join(".", path.relative_to(self.root))  # noqa: PTH118 (pathlib drops the dot)


def _scanned(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder as they are read; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _is_excluded_by_settings(path: Path, configs: SettingsByFolder) -> bool:
    """Whether a settings file excludes a path; the default exclusions are applied while walking."""
    return configs.for_file(str(path)).source is not None and is_excluded(str(path), configs)


def _shown(name: str) -> str:
    return printable(name[:200]) or "''"


def _kind(mode: int) -> str:
    kinds: Iterable[tuple[bool, str]] = ((stat.S_ISDIR(mode), "a folder"), (stat.S_ISREG(mode), "a file"))
    return next((kind for holds, kind in kinds if holds), "something else")

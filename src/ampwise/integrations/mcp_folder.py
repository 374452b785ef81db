"""The folder that an agent may look into: whatever it names lies there, symlinks followed, or is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ampwise.errors import BadInput
from ampwise.lint.config import OWN_FILE, PROJECT_FILE, Configs
from ampwise.lint.files import DEFAULT_EXCLUDE, SUFFIXES, is_excluded
from ampwise.printers.terminal import printable
from ampwise.source.script import LARGEST_BYTES, LARGEST_NOTEBOOK_BYTES, NOTEBOOK

__all__ = ["Folder", "Named", "Word"]

MOST_FILES = 2000  # of one call: more would take minutes
MOST_ENTRIES = 20_000  # that are looked at to find them
MOST_NAMES = 100  # of files and folders, each of which may be walked
LONGEST_NAME = 1000


@dataclass(frozen=True, slots=True)
class Named:
    """What an agent names in the folder: it becomes words of a command line when the folder has been looked at.

    ``before`` is put before the word: an option, such as ``--output=``.
    """

    kind: Literal["file", "folder", "new", "maker", "scripts", "settings"]
    names: Sequence[str] = ()
    before: str = ""


Word = str | Named


class Folder:
    """The folder; ``root`` is its real path.

    To look at a path may take long (a slow disk, a huge folder): the server leaves that to the process of the request.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._proven: set[Path] = set()  # folders whose settings were looked at
        if not self.root.is_dir():
            raise BadInput(f"--root {printable(str(root))}: there is no such folder.")
        if self.root == self.root.parent:
            raise BadInput(f"{self.root} is the whole machine, and an agent would see all of it: give --root FOLDER.")

    def words(self, words: Iterable[Word]) -> list[str]:
        """A command line, with the paths for what is named in it; BadInput for what is not in the folder."""
        return [each for word in words for each in ([word] if isinstance(word, str) else self._paths(word))]

    def file(self, name: str) -> str:
        """A file in the folder, as a path from there that no command line takes for an option."""
        path = self._inside(name)
        mode = self._status(name, path)
        if not stat.S_ISREG(mode):
            raise BadInput(f"{_said(name)}: a file is expected, and it is {_kind(mode)}.")
        largest = LARGEST_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else LARGEST_BYTES
        if path.stat().st_size > largest:
            raise BadInput(f"{_said(name)}: larger than {largest // 1_000_000} MB, so no script.")
        return self._told(path)

    def folder(self, name: str) -> str:
        """A folder in the folder, nothing of which is a symlink that leads out."""
        path = self._inside(name)
        mode = self._status(name, path)
        if not stat.S_ISDIR(mode):
            raise BadInput(f"{_said(name)}: a folder is expected, and it is {_kind(mode)}.")
        for entry in self._entries(name, path):
            self._harmless(entry)
        return self._told(path)

    def new(self, name: str) -> str:
        """A place in the folder where something may be put that is not there yet."""
        return self._told(self._inside(name))

    def scripts(self, names: Sequence[str]) -> list[str]:
        """The scripts and notebooks that files and folders mean, less what the settings exclude from folders.

        Symlinks in folders are not followed.
        """
        found: dict[str, None] = {}
        configs = Configs()
        if len(names) > MOST_NAMES:
            raise BadInput(f"paths: {len(names)} of them; up to {MOST_NAMES} are taken. Name the folder they are in.")
        for name in dict.fromkeys(names):
            for each in self._scripts(name, configs):
                found[each] = None
                if len(found) > MOST_FILES:
                    raise BadInput(f"{_said(name)}: more than {MOST_FILES} files; name a folder below it.")
        if not found:
            raise BadInput(f"{_said(', '.join(names))}: no Python file or notebook there that is not excluded.")
        return list(found)

    def settings(self, folder: Path | None = None) -> None:
        """See to it that the settings of a folder, and of those above it in ours, are no symlinks that lead out."""
        here = folder or self.root
        while here not in self._proven:
            for name in (OWN_FILE, PROJECT_FILE):
                if (here / name).is_symlink():
                    self._inside(str(here / name))
            self._proven.add(here)
            here = self.root if here == self.root else here.parent

    def maker(self, name: str) -> str:
        """``module:function`` as it is, ``file.py:function`` with the file in the folder."""
        place, colon, function = name.rpartition(":")
        if name.startswith("-") or not colon or not function.isidentifier():
            raise BadInput(f"{_said(name)}: module:function or file.py:function is expected, such as train:make.")
        return f"{self.file(place)}:{function}" if place.endswith(".py") else name

    def _paths(self, named: Named) -> list[str]:
        if named.kind == "scripts":
            return self.scripts(named.names)
        if named.kind == "settings":
            self.settings()
            return []
        look = {"file": self.file, "folder": self.folder, "new": self.new, "maker": self.maker}[named.kind]
        return [f"{named.before}{look(name)}" for name in named.names]

    def _scripts(self, name: str, configs: Configs) -> Iterator[str]:
        path = self._inside(name)
        if not stat.S_ISDIR(self._status(name, path)):
            told = self.file(name)
            self.settings(path.parent)
            yield told
            return
        for entry in self._entries(name, path, DEFAULT_EXCLUDE):
            if entry.suffix in SUFFIXES and not entry.is_symlink() and entry.is_file():
                self.settings(entry.parent)
                if not _set_aside(entry, configs):
                    yield self._told(entry)

    def _entries(self, name: str, path: Path, exclude: Sequence[str] = ()) -> Iterator[Path]:
        """What lies below a folder, symlinks themselves and not what they lead to.

        Entries are counted while they are read: a folder with millions of them is not taken into memory.
        """
        seen, pending = 0, [path]
        while pending:
            here: list[tuple[str, bool]] = []
            for entry in _scanned(pending.pop()):
                seen += 1
                if seen > MOST_ENTRIES:
                    raise BadInput(f"{_said(name)}: more than {MOST_ENTRIES} entries; name a folder below it.")
                is_folder = entry.is_dir(follow_symlinks=False)
                if not (is_folder and entry.name in exclude):
                    here.append((entry.path, is_folder))
            here.sort()
            pending += [Path(each) for each, is_folder in reversed(here) if is_folder]
            yield from (Path(each) for each, _ in here)

    def _harmless(self, entry: Path) -> None:
        """Refuse a symlink that leads out, or to a folder with symlinks of its own, and what never ends."""
        path = self._inside(str(entry))
        if not path.exists():
            return
        mode = self._status(str(entry), path)
        if not stat.S_ISREG(mode) and (entry.is_symlink() or not stat.S_ISDIR(mode)):
            said = self._told(entry)
            raise BadInput(
                f"{_said(said)}: a file or a folder is expected, and it is a pipe, a device, or a symlink to a folder."
            )

    def _inside(self, name: str) -> Path:
        """The real path, which need not exist; refused before anybody learns whether it does."""
        if not name.strip() or "\0" in name or len(name) > LONGEST_NAME:
            raise BadInput(f"{_said(name)}: the name of a file or folder is expected.")
        try:
            path = (self.root / name).resolve()
        except (OSError, RuntimeError, UnicodeError) as error:  # symlinks in a circle, or a name that no system has
            raise BadInput(f"{_said(name)}: it cannot be followed: {printable(str(error))}.") from None
        if not path.is_relative_to(self.root):
            raise BadInput(f"{_said(name)}: outside of {self.root}, where ampwise mcp was started. Name what is in it.")
        return path

    def _status(self, name: str, path: Path) -> int:
        try:
            return path.stat().st_mode
        except OSError as error:
            raise BadInput(f"{_said(name)}: {(error.strerror or 'it cannot be read').lower()}.") from None

    def _told(self, path: Path) -> str:
        return os.path.join(".", path.relative_to(self.root))  # noqa: PTH118 (pathlib drops the dot)


def _scanned(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder, as they are read; none of one that cannot be."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _set_aside(path: Path, configs: Configs) -> bool:
    """Whether settings exclude a file; what is excluded without any, no walk comes to."""
    return configs.for_file(str(path)).source is not None and is_excluded(str(path), configs)


def _said(name: str) -> str:
    return printable(name[:200]) or "''"


def _kind(mode: int) -> str:
    kinds: Iterable[tuple[bool, str]] = ((stat.S_ISDIR(mode), "a folder"), (stat.S_ISREG(mode), "a file"))
    return next((said for holds, said in kinds if holds), "neither a file nor a folder")

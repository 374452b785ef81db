"""Which files to check, and which of them can hold a finding at all.

Folders are walked with ``os.scandir``, not ``pathlib``: on large trees this is where the time goes.
"""
# ruff: noqa: PTH100, PTH110, PTH112, PTH116, PTH118, PTH119, PTH120

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterable, Iterator

from ampwise.lint.config import Configs, Settings
from ampwise.source.pattern import Pattern
from ampwise.source.script import Unreadable, system_reason

__all__ = ["DEFAULT_EXCLUDE", "Found", "find_files", "glob_matcher", "ignored_by", "is_excluded"]

SUFFIXES = (".py", ".ipynb")
SHOWN_LINKS = 3

# ruff's list, and site-packages.
DEFAULT_EXCLUDE = (
    ".bzr",
    ".direnv",
    ".eggs",
    ".git",
    ".git-rewrite",
    ".hg",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".nox",
    ".pants.d",
    ".pyenv",
    ".pytest_cache",
    ".pytype",
    ".ruff_cache",
    ".svn",
    ".tox",
    ".venv",
    ".vscode",
    "__pycache__",
    "__pypackages__",
    "_build",
    "buck-out",
    "build",
    "dist",
    "node_modules",
    "site-packages",
    "venv",
)


class Found:
    """The files to check, in order, and what is to be said about the paths that gave none."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.unreadable: list[Unreadable] = []
        self.notes: list[str] = []
        self.excluded = 0  # of the paths


def find_files(paths: Iterable[str], configs: Configs, *, force_exclude: bool = False) -> Found:
    """The files that ``paths`` mean: a file is itself, whatever its name; a folder is its Python and notebooks.

    Symlinks in a folder are followed as long as they lead to something in it: what lies elsewhere was not asked for.
    With ``force_exclude``, what the settings exclude is passed over even if it is one of ``paths``.
    """
    walk = _Walk(configs)
    for path in paths:
        if force_exclude and os.path.exists(path) and is_excluded(path, configs):
            walk.found.excluded += 1
        else:
            walk.add(path)
    walk.count_links_out()
    return walk.found


def is_excluded(path: str, configs: Configs) -> bool:
    """Whether a walk from the project's folder, or without settings from where we stand, would not come to a path."""
    settings = configs.for_file(path)
    top = os.path.abspath(settings.folder if settings.source else ".")
    here = os.path.abspath(path)
    is_below_top = here.startswith(os.path.join(top, ""))
    while here != top:
        above, name = os.path.split(here)
        if _Excluded(configs.for_folder(above), above)(name):
            return True
        if not is_below_top:  # what its folders are called is no business of these settings
            return False
        here = above
    return False


@functools.cache
def glob_matcher(globs: tuple[str, ...]) -> Pattern | None:
    """What matches a name or a path with forward slashes that one of ``globs`` means; None for no globs.

    >>> bool(glob_matcher(("tests/**", "*_pb2.py")).match("tests/a/b.py"))
    True
    """
    import fnmatch

    plain = [glob.replace(os.sep, "/").removeprefix("./").strip("/") for glob in globs]
    # `**/name` means the name at any depth, the top included; to fnmatch it would need a slash before it.
    shorter = [glob.removeprefix("**/") for glob in plain if glob.startswith("**/")]
    patterns = [fnmatch.translate(glob) for glob in (*plain, *shorter) if glob]
    return Pattern("|".join(patterns)) if patterns else None


class _Walk:
    def __init__(self, configs: Configs) -> None:
        self.found = Found()
        self._configs = configs
        self._known: set[str] = set()  # real paths of files
        self._walked: set[tuple[int, int]] = set()  # device and inode of folders
        self._links_out: list[str] = []

    def add(self, path: str) -> None:
        """Take in a path as it was given."""
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a null in the name
            self.found.unreadable.append(Unreadable(path, system_reason(error)))
            return
        if not stat.S_ISDIR(mode):
            self._add_file(os.path.normpath(path), os.path.realpath(path))
            return
        known, trouble = len(self._known), len(self.found.unreadable)
        self._walk(os.path.normpath(path))
        silent = (known, trouble) == (len(self._known), len(self.found.unreadable))
        if silent and not self._has_python(path):
            self.found.notes.append(f"{path}: no Python file or notebook in this folder")

    def count_links_out(self) -> None:
        """Say how many symlinks were left out."""
        count, names = len(self._links_out), ", ".join(self._links_out[:SHOWN_LINKS])
        if count:
            lead = "1 symlink leads" if count == 1 else f"{count} symlinks lead"
            more = ", ..." if count > SHOWN_LINKS else ""
            self.found.notes.append(f"{lead} out of the folder that is checked, not followed: {names}{more}")

    def _has_python(self, path: str) -> bool:
        """Whether something below a folder was found before, through another of the paths."""
        folder = os.path.join(os.path.realpath(path), "")
        return any(known.startswith(folder) for known in self._known)

    def _add_file(self, path: str, real: str) -> None:
        if real not in self._known:
            self._known.add(real)
            self.found.files.append(path)

    def _walk(self, root: str) -> None:
        """All of a folder; links come last, so that a file is known by its own path."""
        top = os.path.realpath(root)
        links: list[str] = []
        self._walk_folders(root, top, links)
        for path in links:  # which grow on the way
            real = os.path.realpath(path)
            if real != top and not real.startswith(os.path.join(top, "")):
                self._links_out.append(path)
            elif os.path.isdir(real):
                self._walk_folders(path, real, links)
            else:
                self._add_file(path, real)

    def _walk_folders(self, folder: str, real: str, links: list[str]) -> None:
        """Take in a folder and those below it, and note their links."""
        pending = [(folder, real)]
        while pending:
            folder, real = pending.pop()
            if self._is_new(folder):
                below, linked = self._visit(folder, real)
                pending += reversed(below)
                links += linked

    def _is_new(self, folder: str) -> bool:
        try:
            status = os.stat(folder)
        except OSError as error:
            self.found.unreadable.append(Unreadable(folder, system_reason(error)))
            return False
        identity = (status.st_dev, status.st_ino)
        if identity in self._walked:
            self._say_if_loop(folder, identity)
            return False
        self._walked.add(identity)
        return True

    def _say_if_loop(self, folder: str, identity: tuple[int, int]) -> None:
        above = os.path.dirname(os.path.abspath(folder))
        while above != os.path.dirname(above):
            status = os.stat(above)
            if (status.st_dev, status.st_ino) == identity:
                self.found.notes.append(f"{folder}: a loop of symbolic links, not followed")
                return
            above = os.path.dirname(above)

    def _visit(self, folder: str, real: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Take in the files of a folder; the folders below it with their real paths, and the links."""
        below: list[tuple[str, str]] = []
        linked: list[str] = []
        excluded = _Excluded(self._configs.for_folder(folder), folder)
        for entry in self._entries(folder):
            if excluded(entry.name):
                continue
            path = entry.path.removeprefix(f".{os.sep}") if folder == "." else entry.path
            try:
                is_folder = entry.is_dir()
                if not is_folder and not entry.name.endswith(SUFFIXES):
                    continue
                if entry.is_symlink():
                    linked += self._followable(entry, path)
                elif is_folder:
                    below.append((path, os.path.join(real, entry.name)))
                elif entry.is_file():
                    self._add_file(path, os.path.join(real, entry.name))
            except OSError as error:  # a link that leads to itself
                self.found.unreadable.append(Unreadable(path, system_reason(error)))
        return below, linked

    def _followable(self, entry: os.DirEntry[str], path: str) -> list[str]:
        """A link that leads to a file or a folder."""
        if entry.is_dir() or entry.is_file():
            return [path]
        if not entry.name.startswith(".#"):  # Emacs' locks are links to nowhere
            self.found.unreadable.append(Unreadable(path, "a symbolic link to nothing"))
        return []

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.found.unreadable.append(Unreadable(folder, system_reason(error)))
            return []


class _Excluded:
    """Which names in one folder the settings leave out."""

    def __init__(self, settings: Settings, folder: str) -> None:
        globs = (*(DEFAULT_EXCLUDE if settings.exclude is None else settings.exclude), *settings.extend_exclude)
        self._names = frozenset(glob for glob in globs if not set(glob) & set("*?[/"))
        self._matcher = glob_matcher(tuple(glob for glob in globs if glob not in self._names))
        relative = os.path.relpath(folder, settings.folder).replace(os.sep, "/") if self._matcher else ""
        self._prefix = "" if relative in ("", ".") else f"{relative}/"

    def __call__(self, name: str) -> bool:
        if name in self._names:
            return True
        if self._matcher is None:
            return False
        return bool(self._matcher.match(name) or self._matcher.match(self._prefix + name))


def ignored_by(settings: Settings, path: str) -> Iterator[str]:
    """The selectors that the settings' per-file-ignores have for a file."""
    if not settings.per_file_ignores:
        return
    name = os.path.basename(path)
    relative = os.path.relpath(path, settings.folder).replace(os.sep, "/")
    for glob, selectors in settings.per_file_ignores.items():
        inverted = glob.startswith("!")  # as in ruff, all files but these
        matcher = glob_matcher((glob.removeprefix("!"),))
        matched = matcher is not None and bool(matcher.match(name) or matcher.match(relative))
        if matched != inverted:
            yield from selectors

"""Find the files to check.

Folders are walked with ``os.scandir``, not ``pathlib``: on large trees, most of the time is spent here.
"""
# ruff: noqa: PTH100, PTH110, PTH112, PTH116, PTH118, PTH119, PTH120

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterable, Iterator

from ampwise.check.config import CheckSettings, SettingsByFolder
from ampwise.check.source.lazy_pattern import LazyPattern
from ampwise.check.source.script import UnreadableFile, os_error_reason

__all__ = ["DEFAULT_EXCLUDE", "FoundFiles", "find_files", "glob_matcher", "ignored_selectors", "is_excluded"]

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


class FoundFiles:
    """Files to check, in order, and messages about paths that gave none."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.unreadable: list[UnreadableFile] = []
        self.notes: list[str] = []
        self.excluded = 0  # number of given paths that are excluded


def find_files(paths: Iterable[str], configs: SettingsByFolder, *, force_exclude: bool = False) -> FoundFiles:
    """Return the files in ``paths``: each file, whatever its name, and the Python files and notebooks of each folder.

    Symlinks in a folder are followed only if they stay in it. With ``force_exclude``, files that the settings exclude
    are skipped even if they are in ``paths``.
    """
    walk = _Walk(configs)
    for path in paths:
        if force_exclude and os.path.exists(path) and is_excluded(path, configs):
            walk.found.excluded += 1
        else:
            walk.add(path)
    walk.note_links_out()
    return walk.found


def is_excluded(path: str, configs: SettingsByFolder) -> bool:
    """Whether the settings, or without them the defaults, exclude a path or a folder above it in the project."""
    settings = configs.for_file(path)
    top = os.path.abspath(settings.folder if settings.source else ".")
    here = os.path.abspath(path)
    is_below_top = here.startswith(os.path.join(top, ""))
    while here != top:
        above, name = os.path.split(here)
        if _Excluded(configs.for_folder(above), above)(name):
            return True
        if not is_below_top:  # names of folders outside of the project do not count
            return False
        here = above
    return False


@functools.cache
def glob_matcher(globs: tuple[str, ...]) -> LazyPattern | None:
    """Return a pattern that matches a name, or a path with forward slashes, of one of ``globs``; None without globs.

    >>> bool(glob_matcher(("tests/**", "*_pb2.py")).match("tests/a/b.py"))
    True
    """
    import fnmatch

    plain = [glob.replace(os.sep, "/").removeprefix("./").strip("/") for glob in globs]
    # `**/name` means the name at any depth, including the top; fnmatch would require a slash before it.
    shorter = [glob.removeprefix("**/") for glob in plain if glob.startswith("**/")]
    patterns = [fnmatch.translate(glob) for glob in (*plain, *shorter) if glob]
    return LazyPattern("|".join(patterns)) if patterns else None


class _Walk:
    def __init__(self, configs: SettingsByFolder) -> None:
        self.found = FoundFiles()
        self._configs = configs
        self._known: set[str] = set()  # real paths of files
        self._walked: set[tuple[int, int]] = set()  # device and inode of folders
        self._links_out: list[str] = []

    def add(self, path: str) -> None:
        """Add a path that was given."""
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            self.found.unreadable.append(UnreadableFile(path, os_error_reason(error)))
            return
        if not stat.S_ISDIR(mode):
            self._add_file(os.path.normpath(path), os.path.realpath(path))
            return
        known, trouble = len(self._known), len(self.found.unreadable)
        self._walk(os.path.normpath(path))
        silent = (known, trouble) == (len(self._known), len(self.found.unreadable))
        if silent and not self._has_python(path):
            self.found.notes.append(f"{path}: no Python file or notebook in this folder")

    def note_links_out(self) -> None:
        """Add a note about symlinks that were not followed."""
        count, names = len(self._links_out), ", ".join(self._links_out[:SHOWN_LINKS])
        if count:
            lead = "1 symlink leads" if count == 1 else f"{count} symlinks lead"
            follow = "was" if count == 1 else "were"
            more = ", ..." if count > SHOWN_LINKS else ""
            self.found.notes.append(f"{lead} out of the checked folder and {follow} not followed: {names}{more}")

    def _has_python(self, path: str) -> bool:
        """Whether a file below a folder was already found through another path."""
        folder = os.path.join(os.path.realpath(path), "")
        return any(known.startswith(folder) for known in self._known)

    def _add_file(self, path: str, real: str) -> None:
        if real not in self._known:
            self._known.add(real)
            self.found.files.append(path)

    def _walk(self, root: str) -> None:
        """Walk a folder; links come last, so that a file is listed under its own path."""
        top = os.path.realpath(root)
        links: list[str] = []
        self._walk_folders(root, top, links)
        for path in links:  # the list grows during the loop
            real = os.path.realpath(path)
            if real != top and not real.startswith(os.path.join(top, "")):
                self._links_out.append(path)
            elif os.path.isdir(real):
                self._walk_folders(path, real, links)
            else:
                self._add_file(path, real)

    def _walk_folders(self, folder: str, real: str, links: list[str]) -> None:
        """Add a folder and those below it, and collect their links."""
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
            self.found.unreadable.append(UnreadableFile(folder, os_error_reason(error)))
            return False
        identity = (status.st_dev, status.st_ino)
        if identity in self._walked:
            self._note_if_loop(folder, identity)
            return False
        self._walked.add(identity)
        return True

    def _note_if_loop(self, folder: str, identity: tuple[int, int]) -> None:
        above = os.path.dirname(os.path.abspath(folder))
        while above != os.path.dirname(above):
            status = os.stat(above)
            if (status.st_dev, status.st_ino) == identity:
                self.found.notes.append(f"{folder}: a loop of symbolic links, not followed")
                return
            above = os.path.dirname(above)

    def _visit(self, folder: str, real: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Add the files of a folder; return the folders below it with their real paths, and the links."""
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
            except OSError as error:  # a link to itself
                self.found.unreadable.append(UnreadableFile(path, os_error_reason(error)))
        return below, linked

    def _followable(self, entry: os.DirEntry[str], path: str) -> list[str]:
        """Return a link if it leads to a file or a folder; report a broken one."""
        if entry.is_dir() or entry.is_file():
            return [path]
        if not entry.name.startswith(".#"):  # Emacs's lock files are broken links
            self.found.unreadable.append(UnreadableFile(path, "a broken symbolic link"))
        return []

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.found.unreadable.append(UnreadableFile(folder, os_error_reason(error)))
            return []


class _Excluded:
    """Test whether the settings exclude a name in one folder."""

    def __init__(self, settings: CheckSettings, folder: str) -> None:
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


def ignored_selectors(settings: CheckSettings, path: str) -> Iterator[str]:
    """Yield the selectors of the settings' per-file-ignores for a file."""
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

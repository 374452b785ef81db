"""Find the files to check.

Folders are walked with ``os.scandir``, not ``pathlib``: on large trees, most of the time is spent here.
"""
# ruff: noqa: PTH100, PTH110, PTH112, PTH116, PTH118, PTH119, PTH120

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ampwise.check.config import CheckSettings, SettingsByFolder
from ampwise.check.source.script import UnreadableFile, os_error_reason

SUFFIXES = (".py", ".ipynb")
SHOWN_LINKS = 3

# ruff's list, and site-packages.
DEFAULT_EXCLUDE = (
    *(".bzr", ".direnv", ".eggs", ".git", ".git-rewrite", ".hg", ".ipynb_checkpoints", ".mypy_cache", ".nox"),
    *(".pants.d", ".pyenv", ".pytest_cache", ".pytype", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode"),
    *("__pycache__", "__pypackages__", "_build", "buck-out", "build", "dist", "node_modules", "site-packages", "venv"),
)


@dataclass(slots=True)
class FoundFiles:
    """Files to check, in order, and messages about paths that gave none."""

    files: list[str] = field(default_factory=list)
    unreadable: list[UnreadableFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    excluded: int = 0  # number of given paths that are excluded


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
    count, names = len(walk.links_out), ", ".join(walk.links_out[:SHOWN_LINKS])
    if count:
        lead, follow = ("1 symlink leads", "was") if count == 1 else (f"{count} symlinks lead", "were")
        more = ", ..." if count > SHOWN_LINKS else ""
        walk.found.notes.append(f"{lead} out of the checked folder and {follow} not followed: {names}{more}")
    return walk.found


def is_excluded(path: str, configs: SettingsByFolder) -> bool:
    """Whether the settings, or without them the defaults, exclude a path or a folder above it in the project."""
    settings = configs.for_file(path)
    top = os.path.abspath(settings.folder if settings.source else ".")
    here = os.path.abspath(path)
    is_below_top = here.startswith(os.path.join(top, ""))
    while here != top:
        above, name = os.path.split(here)
        if _exclusion(configs, above)(name):
            return True
        if not is_below_top:  # names of folders outside of the project do not count
            return False
        here = above
    return False


@functools.cache
def glob_matcher(globs: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern that matches a name, or a path with forward slashes, of one of ``globs``; None without globs.

    >>> bool(glob_matcher(("tests/**", "*_pb2.py")).match("tests/a/b.py"))
    True
    """
    import fnmatch

    plain = [glob.replace(os.sep, "/").removeprefix("./").strip("/") for glob in globs]
    # `**/name` means the name at any depth, including the top; fnmatch would require a slash before it.
    shorter = [glob.removeprefix("**/") for glob in plain if glob.startswith("**/")]
    patterns = [fnmatch.translate(glob) for glob in (*plain, *shorter) if glob]
    return re.compile("|".join(patterns)) if patterns else None


class _Walk:
    def __init__(self, configs: SettingsByFolder) -> None:
        self.found = FoundFiles()
        self.links_out: list[str] = []  # symlinks that were not followed
        self._has_excluded = False  # whether the settings exclude something in the folder that was walked last
        self._configs = configs
        self._known: set[str] = set()  # real paths of files
        self._walked: set[tuple[int, int]] = set()  # device and inode of folders

    def add(self, path: str) -> None:
        """Add a path that was given."""
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            self._cannot_read(path, error)
            return
        if not stat.S_ISDIR(mode):
            self._add_file(os.path.normpath(path), os.path.realpath(path))
            return
        before = (len(self._known), len(self.found.unreadable))
        self._has_excluded = False
        self._walk(os.path.normpath(path))
        if before == (len(self._known), len(self.found.unreadable)):
            folder = os.path.join(os.path.realpath(path), "")
            if not any(known.startswith(folder) for known in self._known):  # else found through another path
                more = " that is not excluded; name a file itself to check it" if self._has_excluded else ""
                self.found.notes.append(f"{path}: no Python file or notebook in this folder{more}")

    def _cannot_read(self, path: str, error: OSError | ValueError) -> None:
        self.found.unreadable.append(UnreadableFile(path, os_error_reason(error)))

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
                self.links_out.append(path)
            elif os.path.isdir(real):
                self._walk_folders(path, real, links)
            else:
                self._add_file(path, real)

    def _walk_folders(self, folder: str, real: str, links: list[str]) -> None:
        """Add the files of a folder and of those below it, and collect their links."""
        pending = [(folder, real)]
        while pending:
            folder, real = pending.pop()
            try:
                if not self._is_new(folder):
                    continue
                is_excluded_here = _exclusion(self._configs, folder)
                with os.scandir(folder) as found:
                    every = sorted(found, key=lambda entry: entry.name)
                entries = [entry for entry in every if not is_excluded_here(entry.name)]
                self._has_excluded |= len(entries) < len(every)
            except OSError as error:
                self._cannot_read(folder, error)
                continue
            below: list[tuple[str, str]] = []
            for entry in entries:
                path = entry.path.removeprefix(f".{os.sep}") if folder == "." else entry.path
                try:
                    if not entry.is_dir() and not entry.name.endswith(SUFFIXES):
                        continue
                    if entry.is_symlink():
                        self._add_link(entry, path, links)
                    elif entry.is_dir():
                        below.append((path, os.path.join(real, entry.name)))
                    elif entry.is_file():
                        self._add_file(path, os.path.join(real, entry.name))
                except OSError as error:  # a link to itself
                    self._cannot_read(path, error)
            pending += reversed(below)

    def _add_link(self, entry: os.DirEntry[str], path: str, links: list[str]) -> None:
        if entry.is_dir() or entry.is_file():
            links.append(path)
        elif not entry.name.startswith(".#"):  # Emacs's lock files are broken links
            self.found.unreadable.append(UnreadableFile(path, "a broken symbolic link"))

    def _is_new(self, folder: str) -> bool:
        """Whether a folder was not walked before; a loop of links is noted."""
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity not in self._walked:
            self._walked.add(identity)
            return True
        above = os.path.dirname(os.path.abspath(folder))
        while above != os.path.dirname(above):
            status = os.stat(above)
            if (status.st_dev, status.st_ino) == identity:
                self.found.notes.append(f"{folder}: a loop of symbolic links, not followed")
                break
            above = os.path.dirname(above)
        return False


def _exclusion(configs: SettingsByFolder, folder: str) -> Callable[[str], bool]:
    """Return a test whether the settings, or the command line, exclude a name in one folder."""
    settings = configs.for_folder(folder)
    globs = (*(DEFAULT_EXCLUDE if settings.exclude is None else settings.exclude), *settings.extend_exclude)
    excludes = _matches(globs, folder, settings.folder)
    if not configs.exclude:
        return excludes
    also_excludes = _matches(configs.exclude, folder, ".")
    return lambda name: excludes(name) or also_excludes(name)


def _matches(globs: tuple[str, ...], folder: str, base: str) -> Callable[[str], bool]:
    """Return a test whether a name in ``folder`` matches one of the globs, by itself or by its path from ``base``."""
    names = frozenset([glob for glob in globs if not set(glob) & set("*?[/")])
    matcher = glob_matcher(tuple([glob for glob in globs if glob not in names]))
    if matcher is None:
        return names.__contains__
    relative = os.path.relpath(folder, base).replace(os.sep, "/")
    prefix = "" if relative in ("", ".") else f"{relative}/"
    match = matcher.match
    return lambda name: bool(name in names or match(name) or match(prefix + name))


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

"""The oldest torch that a project runs with: by its setting ``target-torch``, or by what it requires.

Read from the requirements files, pyproject.toml, setup.cfg and setup.py of the nearest folder that names a version of
torch. A plain ``torch`` names none.
"""
# ruff: noqa: PTH100, PTH118, PTH119, PTH120 (pathlib is slow to import)

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampwise.check.config import version_from
from ampwise.check.source.script import UnreadableFile, read_bytes

FILES = r"requirements.*\.txt|pyproject\.toml|setup\.cfg|setup\.py"
FOLDER = "requirements"  # of further such files
TOP = ".git"
LARGEST_BYTES = 250_000
NEWEST_MINOR = 99  # of a major version, for `<3`
# `torch==1.13.1` as a line or a string, `torch = "^2.0"` and `torch = {version = "2.0"}`; not `torch-geometric==1.0`.
REQUIREMENT = (
    r"""^\s*torch\s*=\s*(?:\{\s*version\s*=\s*)?["'](?P<versions>[^"'\n]*)"""
    r"""|(?:^|["'])\s*torch\s*(?:\[[^\]\n]*\])?\s*\(?(?P<specifiers>[=<>!~][^"'#;\n)]*)"""
)
SPECIFIER = r"\s*(===?|~=|>=|<=|!=|[<>^~])?\s*(\d{1,4})(?:\.(\d{1,4}))?(\.\d)?"


class OldestTorch(NamedTuple):
    """A version of torch that a project may run with, and where it says so."""

    version: tuple[int, int]
    reason: str  # "requirements.txt has torch==1.13.1"


def oldest_torch(path: str, setting: str | None = None) -> OldestTorch | None:
    """Return the oldest torch for a file; None if nothing names one."""
    if setting is not None:
        version = version_from(setting)
        return None if version is None else OldestTorch(version, f"target-torch is {setting}")
    return _required(os.path.dirname(os.path.abspath(path)))


def _required(folder: str) -> OldestTorch | None:
    found = [each for file in _files(folder) for each in _named_in(file)]
    if found:
        return min(found)
    above = os.path.dirname(folder)
    return None if above == folder or os.path.exists(os.path.join(folder, TOP)) else _required(above)  # noqa: PTH110


def _files(folder: str) -> Iterator[str]:
    for inner, pattern in ((folder, FILES), (os.path.join(folder, FOLDER), r".*\.txt")):
        try:
            names = sorted(os.listdir(inner))  # noqa: PTH208
        except OSError:
            continue
        yield from (os.path.join(inner, name) for name in names if re.fullmatch(pattern, name))


def _named_in(file: str) -> Iterator[OldestTorch]:
    try:
        data = read_bytes(file)
    except UnreadableFile:
        return
    if b"torch" not in data or len(data) > LARGEST_BYTES:
        return
    for line in data.decode("utf-8", "replace").splitlines():
        if line.lstrip().startswith("#"):
            continue
        for match in re.finditer(REQUIREMENT, line):
            specifiers = (match["versions"] or match["specifiers"] or "").strip()
            version = _oldest_allowed(specifiers)
            if version is not None:
                yield OldestTorch(version, f"{os.path.basename(file)} has torch{specifiers[:60]}")


def _oldest_allowed(specifiers: str) -> tuple[int, int] | None:
    """Return the lower bound of some specifiers, or the upper one if there is no lower one; None without bounds.

    >>> _oldest_allowed(">=1.13,<3"), _oldest_allowed("<2.4"), _oldest_allowed("!=2.0"), _oldest_allowed("^2.0")
    ((1, 13), (2, 3), None, (2, 0))
    """
    lower, upper = [], []
    for specifier in specifiers.split(","):
        found = re.match(SPECIFIER, specifier)
        if found is None:
            continue
        operator, version = found[1], (int(found[2]), int(found[3] or 0))
        if operator == "<" and not found[4]:  # pip installs the newest below it
            version = (version[0], version[1] - 1) if version[1] else (version[0] - 1, NEWEST_MINOR)
        if operator in ("<", "<="):
            upper.append(version)
        elif operator != "!=":
            lower.append(version)
    return max(lower) if lower else min(upper, default=None)

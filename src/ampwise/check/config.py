"""Settings: ``[tool.ampwise]`` of the nearest pyproject.toml, or an ampwise.toml with the same keys at its top level.

For each file, the nearest settings in its folder or above apply; settings further up are not merged in. Globs are
relative to the folder of the settings file.

A project may be untrusted: its settings choose rules, files, the output format and the oldest torch, but can neither
write files, nor run anything, nor name a file outside of the project.
"""
# ruff: noqa: PTH100, PTH109, PTH113, PTH118, PTH119, PTH120, PTH123 (pathlib is slow, and called per file)

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ampwise.errors import BadInput, nearest

OWN_FILE, PROJECT_FILE = "ampwise.toml", "pyproject.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings from one file; None where it sets nothing."""

    source: str | None = None  # the settings file
    folder: str = "."  # base of its globs
    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    exclude: tuple[str, ...] | None = None
    extend_exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    output_format: str | None = None
    target_torch: str | None = None  # the oldest torch that the code must work with: "2.2"


LISTS = ("select", "ignore", "extend-select", "exclude", "extend-exclude")
KEYS = (*LISTS, "per-file-ignores", "output-format", "target-torch")
# Only the user may request that files are written, not the project that is checked.
FOR_THE_COMMAND_LINE = ("fix", "unsafe-fixes", "add-noqa")

LARGEST_BYTES = 250_000  # large projects have 50,000; the parser takes a second for the worst file of this size
DEEPEST = 32  # nested brackets
MOST_PARTS = 16  # of a dotted key
LONGEST_KEY = 100  # characters of a key that are shown
# As text, for `re` to compile at first use. As in TOML, the closing three quotes may follow up to two more.
STRING_OR_COMMENT = (
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*+"{3,5}|\'\'\'(?:[^\']|\'{1,2}(?!\'))*+\'{3,5}'
    r'|"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'|#[^\n]*+'
)


class SettingsByFolder:
    """Settings of each folder, looked up once."""

    def __init__(self, config: str | None = None, *, isolated: bool = False, exclude: tuple[str, ...] = ()) -> None:
        self.exclude = exclude  # besides what the settings exclude: globs of the command line, for the current folder
        self._everywhere: CheckSettings | None = None
        self._known: dict[str, CheckSettings] = {}
        if config is not None and isolated:
            raise BadInput(f"check --config {config}: cannot be combined with --isolated; use one of them")
        if isolated:
            self._everywhere = CheckSettings()
        elif config is not None:
            if not os.path.isfile(config):
                raise BadInput(f"check --config {config}: no such file")
            found = read_settings(config)
            if found is None:
                raise BadInput(f"check --config {config}: the file has no [tool.ampwise]")
            self._everywhere = replace(found, folder=os.getcwd())  # as in ruff, not the folder of the file

    def for_file(self, path: str) -> CheckSettings:
        """Return the settings of a file."""
        return self.for_folder(os.path.dirname(path))

    def for_folder(self, folder: str) -> CheckSettings:
        """Return the settings of a folder."""
        if self._everywhere is not None:
            return self._everywhere
        folders = [os.path.abspath(folder)]  # up to the first one that is known, or has settings
        while folders[-1] not in self._known:
            here, above = folders[-1], os.path.dirname(folders[-1])
            paths = [os.path.join(here, name) for name in (OWN_FILE, PROJECT_FILE)]
            found = next(
                (settings for path in paths if os.path.isfile(path) and (settings := read_settings(path))), None
            )
            if found is not None or above == here:
                self._known[here] = found or CheckSettings(folder=here)
            else:
                folders.append(above)
        settings = self._known[folders[-1]]
        self._known.update(dict.fromkeys(folders, settings))
        return settings


def read_settings(path: str) -> CheckSettings | None:
    """Read the settings in a TOML file; None if it has none, BadInput if they are invalid."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read the settings in {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > LARGEST_BYTES:
        limit = LARGEST_BYTES // 1000
        raise BadInput(f"{path}: larger than {limit} kB, the limit for settings; --isolated ignores settings files")
    is_project_file = os.path.basename(path) == PROJECT_FILE
    if is_project_file and b"ampwise" not in data:  # the usual case, and the parser is slow to import
        return None
    import tomllib

    try:
        text = data.decode("utf-8")
        _refuse_slow(text, path)
        table: Any = tomllib.loads(text)
    except BadInput:
        raise
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError are
        raise BadInput(f"{path} is not TOML: {error}") from error
    if is_project_file or "tool" in table:
        tool = table.get("tool")
        table = tool.get("ampwise") if isinstance(tool, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise BadInput(f"{path}: tool.ampwise: expected a table, [tool.ampwise], got {_kind(table)}")
    return _settings_from(table, path)


def _settings_from(table: dict[str, Any], path: str) -> CheckSettings:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in FOR_THE_COMMAND_LINE:
            raise BadInput(f"{path}: {key} is not a setting; use it on the command line: ampwise check --{key}")
        if key not in KEYS:
            close = nearest(key[:LONGEST_KEY], KEYS)
            guess = f" Did you mean {' or '.join(close)}?" if close else ""
            raise BadInput(f"{path}: unknown key {key[:LONGEST_KEY]!r}.{guess} The keys are {', '.join(KEYS)}.")
        if key == "output-format":
            if not isinstance(value, str):
                raise BadInput(f'{path}: output-format: expected a name such as "concise", got {_kind(value)}')
            values[key] = value
        elif key == "target-torch":
            if not isinstance(value, str) or version_from(value) is None:
                got = repr(value) if isinstance(value, str) else _kind(value)
                raise BadInput(f'{path}: target-torch: expected a version such as "2.2", got {got[:LONGEST_KEY]}')
            values[key] = value
        elif key == "per-file-ignores":
            if not isinstance(value, dict):
                example = '{"tests/*" = ["AMP101"]}'
                raise BadInput(f"{path}: {key}: expected a table such as {example}, got {_kind(value)}")
            values[key] = {glob: _strings(f"{key}.{glob!r}", codes, path) for glob, codes in value.items()}
        else:
            values[key] = _strings(key, value, path)
    folder = os.path.dirname(os.path.abspath(path))
    return CheckSettings(source=path, folder=folder, **{key.replace("-", "_"): value for key, value in values.items()})


def version_from(text: str) -> tuple[int, int] | None:
    """Return the version in a setting; None if it is none.

    >>> version_from("2.2"), version_from("1.13.1"), version_from("new")
    ((2, 2), (1, 13), None)
    """
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(?:\.\w{1,20})?", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _refuse_slow(text: str, path: str) -> None:
    """Refuse text that the parser would take minutes for: deep nesting, and dotted keys of many parts."""
    plain = re.sub(STRING_OR_COMMENT, "s", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", plain):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > DEEPEST:
            raise BadInput(f"{path}: brackets are nested more than {DEEPEST} deep")
    keys = re.findall(r"[\w.-]+", plain.replace(" ", "").replace("\t", ""))
    if max(map(operator.methodcaller("count", "."), keys), default=0) >= MOST_PARTS:
        raise BadInput(f"{path}: a dotted key has more than {MOST_PARTS} parts")


def _strings(key: str, value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or set(map(type, value)) - {str}:
        raise BadInput(f"{path}: {key}: expected a list of strings, got {_kind(value)}")
    return tuple(value)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "a table"}
    if isinstance(value, list):
        return "a list" if all(isinstance(item, str) for item in value) else "a list with other values than strings"
    return names.get(type(value), "a date")

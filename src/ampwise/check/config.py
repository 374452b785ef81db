"""Settings: ``[tool.ampwise]`` of the nearest pyproject.toml, or an ampwise.toml with the same keys at its top level.

For each file, the nearest settings in its folder or above apply; settings further up are not merged in. Globs are
relative to the folder of the settings file.

A project may be untrusted: its settings choose rules, files and the output format, but can neither write files, nor
run anything, nor name a file outside of the project.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ampwise.errors import BadInput, nearest
from ampwise.finding.frozen import Frozen

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CheckSettings", "SettingsByFolder", "read_settings"]

OWN_FILE, PROJECT_FILE = "ampwise.toml", "pyproject.toml"


class CheckSettings(Frozen):
    """Settings from one file; None where it sets nothing."""

    __slots__ = (  # noqa: RUF023 (the order they are shown in)
        "source",
        "folder",
        "select",
        "ignore",
        "extend_select",
        "exclude",
        "extend_exclude",
        "per_file_ignores",
        "output_format",
    )

    def __init__(
        self,
        *,
        source: str | None = None,
        folder: str = ".",
        select: tuple[str, ...] | None = None,
        ignore: tuple[str, ...] = (),
        extend_select: tuple[str, ...] = (),
        exclude: tuple[str, ...] | None = None,
        extend_exclude: tuple[str, ...] = (),
        per_file_ignores: Mapping[str, tuple[str, ...]] | None = None,
        output_format: str | None = None,
    ) -> None:
        self.source = source  # the settings file
        self.folder = folder  # base of its globs
        self.select, self.ignore, self.extend_select = select, ignore, extend_select
        self.exclude, self.extend_exclude = exclude, extend_exclude
        self.per_file_ignores: Mapping[str, tuple[str, ...]] = per_file_ignores or {}
        self.output_format = output_format


LISTS = ("select", "ignore", "extend-select", "exclude", "extend-exclude")
KEYS = (*LISTS, "per-file-ignores", "output-format")
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

    def __init__(self, config: str | None = None, *, isolated: bool = False) -> None:
        self._everywhere: CheckSettings | None = None
        if config is not None and isolated:
            raise BadInput(f"check --config {config}: cannot be combined with --isolated; use one of them")
        if isolated:
            self._everywhere = CheckSettings()
        elif config is not None:
            self._everywhere = _named_settings(config)
        self._known: dict[str, CheckSettings] = {}

    def for_file(self, path: str) -> CheckSettings:
        """Return the settings of a file."""
        return self.for_folder(os.path.dirname(path))  # noqa: PTH120 (called per file, and pathlib is slow)

    def for_folder(self, folder: str) -> CheckSettings:
        """Return the settings of a folder."""
        return self._everywhere or self._nearest(os.path.abspath(folder))  # noqa: PTH100

    def _nearest(self, folder: str) -> CheckSettings:
        if folder not in self._known:
            above = os.path.dirname(folder)  # noqa: PTH120
            here = _settings_in(folder)
            self._known[folder] = here or (CheckSettings(folder=folder) if above == folder else self._nearest(above))
        return self._known[folder]


def read_settings(path: str) -> CheckSettings | None:
    """Read the settings in a TOML file; None if it has none, BadInput if they are invalid."""
    data = _bytes(path)
    is_project_file = os.path.basename(path) == PROJECT_FILE  # noqa: PTH119
    if is_project_file and b"ampwise" not in data:  # the usual case, and the parser is slow to import
        return None
    import tomllib

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    _refuse_slow(text, path)
    try:
        table: Any = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError is one
        raise BadInput(f"{path} is not TOML: {error}") from error
    if is_project_file or "tool" in table:
        tool = table.get("tool")
        table = tool.get("ampwise") if isinstance(tool, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise BadInput(f"{path}: tool.ampwise: expected a table, [tool.ampwise], got {_kind(table)}")
    return _settings_from(table, path)


def _settings_in(folder: str) -> CheckSettings | None:
    for name in (OWN_FILE, PROJECT_FILE):
        path = os.path.join(folder, name)  # noqa: PTH118
        if os.path.isfile(path):  # noqa: PTH113
            found = read_settings(path)
            if found is not None:
                return found
    return None


def _named_settings(path: str) -> CheckSettings:
    if not os.path.isfile(path):  # noqa: PTH113
        raise BadInput(f"check --config {path}: no such file")
    found = read_settings(path)
    if found is None:
        raise BadInput(f"check --config {path}: the file has no [tool.ampwise]")
    return found.but(folder=os.getcwd())  # noqa: PTH109 (as in ruff, globs are relative to the current folder)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib is slow to import)
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read the settings in {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > LARGEST_BYTES:
        limit = LARGEST_BYTES // 1000
        raise BadInput(f"{path}: larger than {limit} kB, the limit for settings; --isolated ignores settings files")
    return data


def _refuse_slow(text: str, path: str) -> None:
    """Refuse text that the parser would take minutes for: deep nesting, and dotted keys of many parts."""
    import re

    plain = re.sub(STRING_OR_COMMENT, "s", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", plain):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > DEEPEST:
            raise BadInput(f"{path}: brackets are nested more than {DEEPEST} deep")
    keys = re.findall(r"[\w.-]+", plain.replace(" ", "").replace("\t", ""))
    if any(key.count(".") >= MOST_PARTS for key in keys):
        raise BadInput(f"{path}: a dotted key has more than {MOST_PARTS} parts")


def _settings_from(table: dict[str, Any], path: str) -> CheckSettings:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in FOR_THE_COMMAND_LINE:
            raise BadInput(f"{path}: {key} is not a setting; use it on the command line: ampwise check --{key}")
        if key not in KEYS:
            close = nearest(key[:LONGEST_KEY], KEYS)
            guess = f" Did you mean {' or '.join(close)}?" if close else ""
            raise BadInput(f"{path}: unknown key {key[:LONGEST_KEY]!r}.{guess} The keys are {', '.join(KEYS)}.")
        values[key.replace("-", "_")] = _checked(key, value, path)
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    return CheckSettings(source=path, folder=folder, **values)


def _checked(key: str, value: Any, path: str) -> Any:
    if key in LISTS:
        return _strings(key, value, path)
    if key == "per-file-ignores":
        if not isinstance(value, dict):
            raise BadInput(f'{path}: {key}: expected a table such as {{"tests/*" = ["AMP101"]}}, got {_kind(value)}')
        return {glob: _strings(f"{key}.{glob!r}", codes, path) for glob, codes in value.items()}
    return _output_format(value, path)


def _strings(key: str, value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadInput(f"{path}: {key}: expected a list of strings, got {_kind(value)}")
    return tuple(value)


def _output_format(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f'{path}: output-format: expected a name such as "concise", got {_kind(value)}')
    return value


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "a table"}
    if isinstance(value, list):
        return "a list" if all(isinstance(item, str) for item in value) else "a list with other values than strings"
    return names.get(type(value), "a date")

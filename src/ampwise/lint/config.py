"""Settings: ``[tool.ampwise]`` of the nearest pyproject.toml, or an ampwise.toml with the same keys at its top.

The nearest one upward from a file's folder that says anything about ampwise holds for that file, whole: settings of
folders further up are not mixed in. Globs in it count from its folder.

A project may be a stranger's: its settings choose rules, files and the form of the output, and can neither write, nor
run anything, nor name a file outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ampwise.errors import BadInput, UnknownName, nearest
from ampwise.frozen import Frozen

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Configs", "Settings", "read_settings"]

OWN_FILE, PROJECT_FILE = "ampwise.toml", "pyproject.toml"


class Settings(Frozen):
    """What one file of settings says; None where it says nothing."""

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
        self.source = source  # the file itself
        self.folder = folder  # what its globs are relative to
        self.select, self.ignore, self.extend_select = select, ignore, extend_select
        self.exclude, self.extend_exclude = exclude, extend_exclude
        self.per_file_ignores: Mapping[str, tuple[str, ...]] = per_file_ignores or {}
        self.output_format = output_format


LISTS = ("select", "ignore", "extend-select", "exclude", "extend-exclude")
KEYS = (*LISTS, "per-file-ignores", "output-format")
# What writes files is for whoever runs the command to say, and not for the project that is checked.
FOR_THE_COMMAND_LINE = ("fix", "unsafe-fixes", "add-noqa")

LARGEST_BYTES = 250_000  # a large project's has 50,000, and the worst of this size takes the parser a second
DEEPEST = 32  # brackets within brackets
MOST_PARTS = 16  # of a dotted key
LONGEST_KEY = 100  # characters of one that are shown
# As text, for `re` to compile at first use. Strings end as in TOML: three quotes may have up to two more before them.
STRING_OR_COMMENT = (
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*+"{3,5}|\'\'\'(?:[^\']|\'{1,2}(?!\'))*+\'{3,5}'
    r'|"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'|#[^\n]*+'
)


class Configs:
    """The settings that hold for each folder, each looked up once."""

    def __init__(self, config: str | None = None, *, isolated: bool = False) -> None:
        self._everywhere: Settings | None = None
        if config is not None and isolated:
            raise BadInput(f"check --config {config} --isolated: settings of a file, or none at all; not both")
        if isolated:
            self._everywhere = Settings()
        elif config is not None:
            self._everywhere = _named_settings(config)
        self._known: dict[str, Settings] = {}

    def for_file(self, path: str) -> Settings:
        """The settings that hold for a file."""
        return self.for_folder(os.path.dirname(path))  # noqa: PTH120 (once a file: a Path would show)

    def for_folder(self, folder: str) -> Settings:
        """The settings that hold in a folder."""
        return self._everywhere or self._nearest(os.path.abspath(folder))  # noqa: PTH100

    def _nearest(self, folder: str) -> Settings:
        if folder not in self._known:
            above = os.path.dirname(folder)  # noqa: PTH120
            here = _settings_in(folder)
            self._known[folder] = here or (Settings(folder=folder) if above == folder else self._nearest(above))
        return self._known[folder]


def read_settings(path: str) -> Settings | None:
    """What a TOML file says about ampwise; None if nothing, BadInput if it cannot be understood."""
    data = _bytes(path)
    is_project_file = os.path.basename(path) == PROJECT_FILE  # noqa: PTH119
    if is_project_file and b"ampwise" not in data:  # most say nothing, and the parser is slow to import
        return None
    import tomllib

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    _refuse_endless(text, path)
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
        raise BadInput(f"{path}: tool.ampwise is {_kind(table)}; it must be a table, [tool.ampwise]")
    return _understood(table, path)


def _settings_in(folder: str) -> Settings | None:
    for name in (OWN_FILE, PROJECT_FILE):
        path = os.path.join(folder, name)  # noqa: PTH118
        if os.path.isfile(path):  # noqa: PTH113
            found = read_settings(path)
            if found is not None:
                return found
    return None


def _named_settings(path: str) -> Settings:
    if not os.path.isfile(path):  # noqa: PTH113
        raise BadInput(f"check --config {path}: there is no such file")
    found = read_settings(path)
    if found is None:
        raise BadInput(f"check --config {path}: it has no [tool.ampwise]")
    return found.but(folder=os.getcwd())  # noqa: PTH109 (as ruff: its globs count from where one stands)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib takes longer to import than the rest of this)
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"cannot read the settings in {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > LARGEST_BYTES:
        limit = LARGEST_BYTES // 1000
        raise BadInput(f"{path}: larger than {limit} kB, and settings are read up to that; --isolated reads none")
    return data


def _refuse_endless(text: str, path: str) -> None:
    """Refuse what the parser would recurse on or take minutes for: its time grows with the square of a key's parts."""
    import re

    plain = re.sub(STRING_OR_COMMENT, "s", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", plain):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > DEEPEST:
            raise BadInput(f"{path}: brackets nested more than {DEEPEST} deep; no settings are")
    keys = re.findall(r"[\w.-]+", plain.replace(" ", "").replace("\t", ""))
    if any(key.count(".") >= MOST_PARTS for key in keys):
        raise BadInput(f"{path}: a dotted key of more than {MOST_PARTS} parts; no setting has one")


def _understood(table: dict[str, Any], path: str) -> Settings:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in FOR_THE_COMMAND_LINE:
            raise BadInput(f"{path}: {key} is for the command line, not for settings: ampwise check --{key}")
        if key not in KEYS:
            close = nearest(key[:LONGEST_KEY], KEYS)
            guess = f" Did you mean {' or '.join(close)}?" if close else ""
            raise BadInput(f"{path}: unknown key {key[:LONGEST_KEY]!r}.{guess} The keys are {', '.join(KEYS)}.")
        values[key.replace("-", "_")] = _checked(key, value, path)
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    return Settings(source=path, folder=folder, **values)


def _checked(key: str, value: Any, path: str) -> Any:
    if key in LISTS:
        return _strings(key, value, path)
    if key == "per-file-ignores":
        if not isinstance(value, dict):
            raise BadInput(f'{path}: {key} is {_kind(value)}; it must be a table, such as {{"tests/*" = ["AMP101"]}}')
        return {glob: _strings(f"{key}.{glob!r}", codes, path) for glob, codes in value.items()}
    return _output_format(value, path)


def _strings(key: str, value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadInput(f"{path}: {key} is {_kind(value)}; it must be a list of strings")
    return tuple(value)


def _output_format(value: Any, path: str) -> str:
    from ampwise.printers import output_formats

    if not isinstance(value, str):
        raise BadInput(f"{path}: output-format is {_kind(value)}; it must be one of {', '.join(output_formats())}")
    if value not in output_formats():
        listing = f"The formats are {', '.join(output_formats())}."
        raise UnknownName(f"output-format in {path}", value, output_formats(), listing=listing)
    return value


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "a table"}
    return names.get(type(value), "a list with something else than strings" if isinstance(value, list) else "a date")

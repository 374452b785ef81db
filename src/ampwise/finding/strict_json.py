"""Strict JSON, which every parser can read.

JSON has no NaN and no infinity, so they become the strings "NaN", "Infinity" and "-Infinity", which float() accepts;
null would mean "unknown". Values of other types become their text.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1  # of the objects that commands print with --json; cli/_schemas describes them
DEEPEST = 50  # data nested deeper is a mistake, or contains itself
MOST = 1_000_000  # lists and objects in a file: each takes up to 250 bytes of memory, but as few as 3 in the file


def dumps(value: Any, *, indent: int | None = 2) -> str:
    """Return ``value`` as strict JSON in printable ASCII, ending in a newline.

    >>> print(dumps({"norm": float("inf"), "shape": (2, 3)}, indent=None), end="")
    {"norm": "Infinity", "shape": [2, 3]}
    """
    import json  # takes longer to import than most commands take to run

    # json does not escape DEL, which is a control character.
    return json.dumps(to_json_types(value), indent=indent, allow_nan=False).replace("\x7f", r"\u007f") + "\n"


def loads(data: str | bytes, *, most: int = MOST) -> Any:
    """Parse strict JSON; raise ValueError for NaN, and for duplicate names, which parsers treat differently.

    most: limit on lists and objects. A caller limits the bytes of a file; this limits what a small file becomes in
    memory.

    >>> loads('{"norm": 1.0, "norm": 2.0}')
    Traceback (most recent call last):
    ValueError: duplicate name 'norm'
    """
    import json

    refuse_many(data, most)
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    refuse_surrogates(data, value)
    return value


def refuse_many(data: str | bytes, most: int = MOST) -> None:
    """Raise ValueError for JSON with more than ``most`` lists and objects; brackets in strings count, too.

    >>> refuse_many("[[], [], {}]", 3)
    Traceback (most recent call last):
    ValueError: it has 4 lists and objects; the limit is 3
    """
    found = data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")
    if found > most:
        raise ValueError(f"it has {found:,} lists and objects; the limit is {most:,}")


def refuse_surrogates(data: str | bytes, value: Any) -> None:
    r"""Raise ValueError for a lone surrogate, which cannot be encoded; ``value`` is the parsed ``data``.

    >>> refuse_surrogates(r'["\ud83d\ude00"]', ["\U0001f600"])
    >>> refuse_surrogates(r'["\ud83d"]', ["\ud83d"])
    Traceback (most recent call last):
    ValueError: it has text that is not valid Unicode
    """
    import json

    escapes = ("\\ud", "\\uD") if isinstance(data, str) else (b"\\ud", b"\\uD")
    if not any(escape in data for escape in escapes):  # type: ignore[operator]
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has text that is not valid Unicode") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate name {key[:80]!r}")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def to_json_types(value: Any, depth: int = 0) -> Any:
    """Convert any value to JSON types.

    >>> to_json_types({"norm": float("inf"), 3: (1, None, True)})
    {'norm': 'Infinity', '3': [1, None, True]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _valid(value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return {_valid(str(key)): to_json_types(part, depth + 1) for key, part in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [to_json_types(part, depth + 1) for part in value]
    if isinstance(value, int) or (not isinstance(value, float) and isinstance(value, numbers.Integral)):
        return int(value)  # numpy's, too
    if not isinstance(value, (float, numbers.Real)):
        return _valid(str(value))
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _valid(text: str) -> str:
    # A file name that is not UTF-8 has lone surrogates, which strict parsers refuse.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

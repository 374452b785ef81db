"""JSON that every parser reads.

Evidence may hold anything. JSON has no NaN and no infinity, so they become the strings "NaN", "Infinity" and
"-Infinity", which float() takes back; a null would say "unknown", and a NaN is known all too well. What JSON
has no form for at all becomes its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "loads", "plain", "refuse_halves", "refuse_many"]

DEEPEST = 50  # evidence nested deeper is a mistake, or holds itself
MOST = 1_000_000  # lists and objects in a file: each takes up to 250 bytes of memory, and as few as 3 of the file


def dumps(value: Any, *, indent: int | None = 2) -> str:
    """``value`` as strict JSON in printable ASCII, ending in a newline.

    >>> print(dumps({"norm": float("inf"), "shape": (2, 3)}, indent=None), end="")
    {"norm": "Infinity", "shape": [2, 3]}
    """
    import json  # takes longer to load than most verbs to run

    # json leaves DEL as it is, the one control character that ASCII has above its letters.
    return json.dumps(plain(value), indent=indent, allow_nan=False).replace("\x7f", r"\u007f") + "\n"


def loads(data: str | bytes, *, most: int = MOST) -> Any:
    """What strict JSON holds: ValueError for a name that is there twice, which readers read differently, and for NaN.

    most: lists and objects that are made of it. Who reads a file limits its bytes; this is the limit of what small
    files become in memory.

    >>> loads('{"norm": 1.0, "norm": 2.0}')
    Traceback (most recent call last):
    ValueError: 'norm' is in it twice
    """
    import json

    refuse_many(data, most)
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    refuse_halves(data, value)
    return value


def refuse_many(data: str | bytes, most: int = MOST) -> None:
    """ValueError for JSON that may have more than so many lists and objects. Brackets in text count, too.

    >>> refuse_many("[[], [], {}]", 3)
    Traceback (most recent call last):
    ValueError: it has 4 lists and objects, and 3 is the most
    """
    found = data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")
    if found > most:
        raise ValueError(f"it has {found:,} lists and objects, and {most:,} is the most")


def refuse_halves(data: str | bytes, value: Any) -> None:
    r"""ValueError where text has half a surrogate pair, which cannot be written; ``value`` is that of ``data``.

    >>> refuse_halves(r'["\ud83d\ude00"]', ["\U0001f600"])
    >>> refuse_halves(r'["\ud83d"]', ["\ud83d"])
    Traceback (most recent call last):
    ValueError: it has text that is no Unicode
    """
    import json

    escapes = ("\\ud", "\\uD") if isinstance(data, str) else (b"\\ud", b"\\uD")
    if not any(escape in data for escape in escapes):  # type: ignore[operator]
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has text that is no Unicode") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:80]!r} is in it twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def plain(value: Any, depth: int = 0) -> Any:
    """Anything as what JSON has.

    >>> plain({"norm": float("inf"), 3: (1, None, True)})
    {'norm': 'Infinity', '3': [1, None, True]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(float(value))
    if depth < DEEPEST and isinstance(value, Mapping):
        return {_valid(str(key)): plain(part, depth + 1) for key, part in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part, depth + 1) for part in value]
    return _rarer(value)


def _rarer(value: Any) -> Any:
    """Numbers that are not Python's own, such as numpy's; else the text."""
    import numbers

    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _number(float(value))
    return _valid(str(value))


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _valid(text: str) -> str:
    # A file name that is not UTF-8 comes with half surrogate pairs, which strict parsers refuse.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

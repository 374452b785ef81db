"""Values from a record in words: evidence, durations, moments, shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

__all__ = ["duration", "moment", "number", "one_line", "percent", "scale_words", "short", "size"]

LONGEST = 200  # characters of a value of evidence: a line is for reading
NAMED = 4  # of a list


def short(value: object) -> str:
    """A value in few characters: six digits are what a person compares; JSON has them all.

    >>> short(True), short(["a", "b"]), short(["a"] * 9), short({"fp16": 0.5})
    ('yes', 'a, b', 'a, a, a, a and 5 more', 'fp16 0.5')
    """
    text = _written(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        value = [f"{_key(name)} {short(part)}" for name, part in value.items() if part is not None]
    if not isinstance(value, (list, tuple)):
        return str(value)
    named = ", ".join(short(part) for part in value[:NAMED])
    more = len(value) - NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def one_line(evidence: Mapping[str, Any]) -> str:
    """The evidence of a finding; what is not known is not told.

    >>> one_line({"norm": 1.5258789e-05, "lost_share": 0.4131, "scale": None, "worst": ["head", "stem"]})
    'norm: 1.52588e-05; lost share: 41.3%; worst: head, stem'
    >>> one_line({"note": "It runs compiled.", "capsule": "step-000012"})
    'note: It runs compiled; capsule: step-000012'
    """
    told = [f"{_key(name)}: {_evidence(name, value)}" for name, value in evidence.items() if value is not None]
    return "; ".join([*(part.removesuffix(".") for part in told[:-1]), *told[-1:]])


def _evidence(name: object, value: object) -> str:
    is_share = "share" in str(name) and isinstance(value, float) and 0 <= value <= 1
    return percent(value) if is_share and isinstance(value, float) else short(value)


def _key(name: object) -> str:
    return str(name).replace("_", " ")


def percent(share: float) -> str:
    """A share that is not zero never reads as zero.

    >>> percent(0.0), percent(0.00001), percent(0.1234), percent(1.0)
    ('0', '<0.1%', '12.3%', '100%')
    """
    if not share:
        return "0"
    if share < 0.001:
        return "<0.1%"
    return "100%" if share >= 1 else ">99.9%" if share > 0.9994 else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Three digits, and the unit that makes them easy to read.

    >>> duration(0.01184), duration(0.8839), duration(2.5), duration(3e-5), duration(75)
    ('11.8 ms', '884 ms', '2.5 s', '30 µs', '75 s')
    """
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.0f} {unit}" if seconds * factor >= 999.5 else f"{seconds * factor:.3g} {unit}"


def size(amount: float) -> str:
    """Bytes as people count memory, in powers of 1024.

    >>> size(512), size(1536), size(124_439_808 * 4)
    ('512 B', '1.5 KiB', '475 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def scale_words(scale: float) -> str:
    """A loss scale as one thinks of it: a power of two, once it is too long to read.

    >>> scale_words(65536.0), scale_words(2.0**20), scale_words(3000.5)
    ('65,536', '2^20', '3000.5')
    """
    mantissa, exponent = math.frexp(scale)
    if scale >= 2**20 and mantissa == 0.5:
        return f"2^{exponent - 1}"
    return f"{scale:,.0f}" if scale.is_integer() and scale < 1e9 else f"{scale:.6g}"


def moment(text: str) -> str:
    """A time from a manifest, as people write it; a text that is none stays as it is.

    >>> moment("2026-11-15T16:46:17+02:00")
    '2026-11-15 14:46:17 UTC'
    """
    try:
        at = datetime.fromisoformat(text)
        return f"{at.astimezone(UTC) if at.tzinfo else at:%Y-%m-%d %H:%M:%S}{' UTC' if at.tzinfo else ''}"
    except (ValueError, OverflowError):
        return text


def number(value: object) -> float | None:
    """A number of a record, where "NaN" and "Infinity" are strings; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of a thousand digits
        return math.inf

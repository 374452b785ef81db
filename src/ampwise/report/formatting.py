"""Format values from a record as text: evidence, durations, times, shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LONGEST = 200  # characters of a value of evidence
NAMED = 4  # items of a list to show


def format_short(value: object) -> str:
    """Return a value in few characters, with six digits; JSON has all of them.

    >>> format_short(True), format_short(["a", "b"]), format_short(["a"] * 9), format_short({"fp16": 0.5})
    ('yes', 'a, b', 'a, a, a, a and 5 more', 'fp16 0.5')
    """
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, (Mapping, list, tuple)):
        parts = list(value)
        if isinstance(value, Mapping):
            parts = [f"{_key(name)} {format_short(part)}" for name, part in value.items() if part is not None]
        more = len(parts) - NAMED
        text = ", ".join(map(format_short, parts[:NAMED])) + (f" and {more:,} more" if more > 0 else "")
    else:
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def evidence_line(evidence: Mapping[str, Any]) -> str:
    """Return the evidence of a finding in a line, without unknown values.

    >>> evidence_line({"norm": 1.5258789e-05, "lost_share": 0.4131, "scale": None, "worst": ["head", "stem"]})
    'norm: 1.52588e-05; lost share: 41.3%; worst: head, stem'
    >>> evidence_line({"note": "It runs compiled.", "capsule": "step-000012"})
    'note: It runs compiled; capsule: step-000012'
    """
    parts = []
    for name, value in evidence.items():
        if value is not None:
            is_share = "share" in str(name) and isinstance(value, float) and 0 <= value <= 1
            parts.append(f"{_key(name)}: {format_percent(value) if is_share else format_short(value)}")
    return "; ".join([*(part.removesuffix(".") for part in parts[:-1]), *parts[-1:]])


def _key(name: object) -> str:
    return str(name).replace("_", " ")


def format_percent(share: float) -> str:
    """Return a share as percent; one that is not zero never reads as zero.

    >>> format_percent(0.0), format_percent(0.00001), format_percent(0.1234), format_percent(1.0)
    ('0', '<0.1%', '12.3%', '100%')
    """
    if not share:
        return "0"
    if share < 0.001:
        return "<0.1%"
    return "100%" if share >= 1 else ">99.9%" if share > 0.9994 else f"{share:.1%}"


def format_duration(seconds: float) -> str:
    """Return a duration with three digits and a suitable unit.

    >>> [format_duration(seconds) for seconds in (0.01184, 0.8839, 2.5, 3e-5, 75)]
    ['11.8 ms', '884 ms', '2.5 s', '30 µs', '75 s']
    """
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.0f} {unit}" if seconds * factor >= 999.5 else f"{seconds * factor:.3g} {unit}"


def format_bytes(amount: float) -> str:
    """Return a number of bytes with a unit, in powers of 1024.

    >>> format_bytes(512), format_bytes(1536), format_bytes(124_439_808 * 4)
    ('512 B', '1.5 KiB', '475 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def format_scale(scale: float) -> str:
    """Return a loss scale as text; a large power of two as such.

    >>> format_scale(65536.0), format_scale(2.0**20), format_scale(3000.5)
    ('65,536', '2^20', '3000.5')
    """
    mantissa, exponent = math.frexp(scale)
    if scale >= 2**20 and mantissa == 0.5:
        return f"2^{exponent - 1}"
    return f"{scale:,.0f}" if scale.is_integer() and scale < 1e9 else f"{scale:.6g}"


def format_time(text: str) -> str:
    """Return a time from a manifest in readable form; a text that is not a time is returned unchanged.

    >>> format_time("2026-11-15T16:46:17+02:00")
    '2026-11-15 14:46:17 UTC'
    """
    try:
        at = datetime.fromisoformat(text)
        return f"{at.astimezone(UTC) if at.tzinfo else at:%Y-%m-%d %H:%M:%S}{' UTC' if at.tzinfo else ''}"
    except (ValueError, OverflowError):
        return text


def lower_first(text: str) -> str:
    """Return a sentence as a part of another: in lower case, unless it starts with a name, and without its full stop.

    >>> lower_first("The loss is NaN."), lower_first("BF16 is emulated."), lower_first("A step was skipped.")
    ('the loss is NaN', 'BF16 is emulated', 'a step was skipped')
    """
    first, text = text.split(maxsplit=1)[0], text.strip().rstrip(".")
    return text[:1].lower() + text[1:] if len(first) == 1 or first[1:].islower() else text


def read_number(value: object) -> float | None:
    """Return a number from a record, where "NaN" and "Infinity" are strings; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of a thousand digits
        return math.inf

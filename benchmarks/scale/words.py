"""Numbers as one reads them in a table."""

from __future__ import annotations

__all__ = ["byte_words", "number_words", "time_words"]

TIMES = (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 7200.0))
BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def time_words(seconds: float) -> str:
    """
    >>> time_words(0.0), time_words(2.4e-4), time_words(0.983), time_words(47.2), time_words(8000)
    ('–', '240 µs', '983 ms', '47 s', '2.2 h')
    """
    if not seconds:
        return "–"
    for unit, size, until in TIMES:
        if seconds < until:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 3600)} h"


def byte_words(count: float) -> str:
    """
    >>> byte_words(71), byte_words(12.4e9)
    ('71 B', '12 GB')
    """
    for unit, size in BYTES:
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count:.0f} B"


def number_words(value: float, unit: str) -> str:
    """
    >>> number_words(3e-5, "s"), number_words(5e10, "bytes/s"), number_words(2.0**24, "tokens")
    ('30 µs', '50 GB/s', '16,777,216 tokens')
    """
    if unit == "s":
        return time_words(value)
    if unit == "bytes/s":
        return f"{byte_words(value)}/s"
    if unit == "FLOP/s":
        return f"{value / 1e12:,.0f} TFLOP/s"
    if unit == "bytes" and value >= 1e6:
        return byte_words(value)
    return f"{value:,.0f} {unit}" if unit else f"{value:g}"


def _short(number: float) -> str:
    """Two digits, or three."""
    return f"{number:,.0f}" if number >= 20 else f"{number:.2g}"

"""Convert text from a record to markup: escaped, with `names` as code and exponents as superscripts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup, escape

from ampwise.finding.terminal import printable

__all__ = ["FILTERS", "finalize"]


def finalize(value: Any) -> Any:
    """Make every value that a template prints safe: no characters that hide or reorder others."""
    return value if isinstance(value, (Markup, int, float)) else printable(str(value))


def prose(text: str) -> Markup:
    """Return text as markup: `names` in backquotes and indented lines become code.

    >>> prose("`a<b>` is\\n  less")
    Markup('<code>a&lt;b&gt;</code> is<br><code class="indented">  less</code>')
    """
    return Markup("<br>").join(_line(line) for line in text.split("\n"))


def _line(line: str) -> Markup:
    if line.startswith(" "):
        return Markup('<code class="indented">{}</code>').format(printable(line))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(line)))))


def raised(text: str) -> Markup:
    """Return text with the exponents of powers of two as superscripts.

    >>> raised("at most 2^-24")
    Markup('at most 2<sup>−24</sup>')
    """
    escaped = str(escape(printable(text)))
    return Markup(re.sub(r"2\^(-?\d+)", lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", escaped))


def source(text: str) -> Markup:
    """Return lines of code, escaped line by line."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def diff_lines(text: str) -> list[tuple[str, str]]:
    """Return the lines of a unified diff, each with its kind: "added", "removed", "head" or "same"."""
    return [(_diff_kind(line), line.expandtabs(4)) for line in text.splitlines()]


def _diff_kind(line: str) -> str:
    if line.startswith(("---", "+++", "@@")):
        return "head"
    return {"+": "added", "-": "removed"}.get(line[:1], "same")


def joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


FILTERS = {"prose": prose, "source": source, "raised": raised, "diff_lines": diff_lines, "joined": joined}

"""Text from a record as markup: escaped, with `names` in code and powers of two raised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup, escape

from ampwise.printers.terminal import printable

__all__ = ["FILTERS", "finalize"]


def finalize(value: Any) -> Any:
    """What every text goes through on its way into a template: nothing hides or reorders characters."""
    return value if isinstance(value, (Markup, int, float)) else printable(str(value))


def prose(text: str) -> Markup:
    """Sentences in which `names` stand between backquotes, and code below may be indented.

    >>> prose("`a<b>` is\\n  less")
    Markup('<code>a&lt;b&gt;</code> is<br><code class="indented">  less</code>')
    """
    return Markup("<br>").join(_line(line) for line in text.split("\n"))


def _line(line: str) -> Markup:
    if line.startswith(" "):
        return Markup('<code class="indented">{}</code>').format(printable(line))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(line)))))


def raised(text: str) -> Markup:
    """Powers of two with their exponents raised.

    >>> raised("at most 2^-24")
    Markup('at most 2<sup>−24</sup>')
    """
    escaped = str(escape(printable(text)))
    return Markup(re.sub(r"2\^(-?\d+)", lambda power: f"2<sup>{power[1].replace('-', '−')}</sup>", escaped))


def source(text: str) -> Markup:
    """Lines of code, which stay lines."""
    return Markup("\n").join(printable(line) for line in text.split("\n"))


def diff_lines(text: str) -> list[tuple[str, str]]:
    """The lines of a unified diff, each with what it does: "added", "removed", "head" or "same"."""
    return [(_deed(line), line.expandtabs(4)) for line in text.splitlines()]


def _deed(line: str) -> str:
    if line.startswith(("---", "+++", "@@")):
        return "head"
    return {"+": "added", "-": "removed"}.get(line[:1], "same")


def joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


FILTERS = {"prose": prose, "source": source, "raised": raised, "diff_lines": diff_lines, "joined": joined}

"""Colour Python source with Python's own tokenizer: lines of code as markup, everything escaped."""

from __future__ import annotations

import io
import keyword
import token
import tokenize
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from ampwise.finding.terminal import printable

STRINGS = {token.STRING, *(getattr(token, f"FSTRING_{part}", -1) for part in ("START", "MIDDLE", "END"))}  # from 3.12
LONGEST = 400  # characters of a line to show
Span = tuple[int, int, str]  # columns, and a class of page.css


def coloured_lines(lines: Mapping[int, str]) -> dict[int, Markup]:
    """Return lines of source, by number, as markup."""
    return dict(zip(lines, coloured(list(lines.values())), strict=True))


def coloured(lines: Sequence[str]) -> list[Markup]:
    """Return lines of source as markup. An excerpt may begin or end anywhere, and need not be Python at all.

    >>> coloured(["if x:  # why"])
    [Markup('<b class="k">if</b> x:  <b class="c"># why</b>')]
    """
    # A line of a forged record may contain the end of one, which would shift the rows below.
    texts = [line.expandtabs(4)[:LONGEST].replace("\r", "\\r").replace("\n", "\\n") for line in lines]
    # In parentheses, lines may be indented in any way.
    spans = _spans(["(", *texts, ")"])
    if spans is None:  # half a string or an unmatched bracket: line by line, as far as each can be read
        alone = [_spans(["(", text, ")"]) or {} for text in texts]
        by_line = [found.get(2, []) for found in alone]
    else:
        by_line = [spans.get(row, []) for row in range(2, len(texts) + 2)]
    return [_marked(text, found) for text, found in zip(texts, by_line, strict=True)]


def _spans(lines: Sequence[str]) -> dict[int, list[Span]] | None:
    """Return the parts of each line to colour, by row from 1; None if the lines cannot be tokenized."""
    found: dict[int, list[Span]] = {}
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return None
    for place, each in enumerate(tokens):
        if each.type == token.ERRORTOKEN and not each.string.isspace():
            return None
        if each.type in STRINGS:
            style = "s"
        elif each.type == token.COMMENT:
            style = "c"
        elif each.type == token.NUMBER:
            style = "n"
        elif each.type == token.NAME and keyword.iskeyword(each.string):
            style = "k"
        elif each.type == token.NAME and tokens[place + 1].string == "(":
            style = "f"  # a call, or the name of a function that is defined here
        else:
            continue
        for row in range(each.start[0], each.end[0] + 1):
            start = each.start[1] if row == each.start[0] else 0
            stop = each.end[1] if row == each.end[0] else len(lines[row - 1])
            found.setdefault(row, []).append((start, stop, style))
    return found


def _marked(text: str, spans: Sequence[Span]) -> Markup:
    parts, reached = [], 0
    for start, stop, style in spans:
        if start < reached:
            continue
        parts.append(escape(printable(text[reached:start])))
        parts.append(Markup('<b class="{}">{}</b>').format(style, printable(text[start:stop])))
        reached = max(stop, start)
    return Markup("").join([*parts, escape(printable(text[reached:]))])

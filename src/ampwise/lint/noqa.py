"""Comments that suppress findings: ``# noqa``, ``# noqa: AMP101``, and ``# ampwise: noqa`` for a whole file.

A comment counts on the line of the finding, and on the first and last line of the statement's logical line that it
lies on. Names of rules do as well as codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ampwise.finding import Finding
from ampwise.source.script import Script

__all__ = ["Suppressions", "suppressions", "with_noqa"]

# As text, for `re` to compile at first use: most files have no such comment, and compiling takes milliseconds.
ITEM = r"(?:[A-Z]+[0-9]+|[A-Z0-9]+(?:-[A-Z0-9]+)+)\b"
CODES = rf"(?::\s*(?P<codes>{ITEM}(?:[,\s]+{ITEM})*)?|(?![\w:-]))"
ON_LINE = rf"(?i)#\s*noqa{CODES}"
IN_FILE = rf"(?i)#\s*ampwise:\s*noqa{CODES}"
EVERYTHING = frozenset({"*"})
WITHOUT_CODES = r"(?i)noqa(?!\s*:)"


class Suppressions:
    """What one file's comments suppress. Codes are in capitals, names too; EVERYTHING is all of them."""

    def __init__(
        self,
        in_file: frozenset[str],
        by_line: dict[int, frozenset[str]],
        logical_lines: dict[int, tuple[int, int]],
    ) -> None:
        self.in_file = in_file
        self.by_line = by_line
        self.logical_lines = logical_lines  # first and last line, for lines of statements that have several

    def cover(self, finding: Finding, line: int) -> bool:
        """Whether ``finding``, which lies on ``line`` of the script's text, is suppressed."""
        lines = {line, *self.logical_lines.get(line, ())}
        spoken_of = self.in_file.union(*(self.by_line.get(number, ()) for number in lines))
        return not spoken_of.isdisjoint({"*", finding.rule.code, finding.rule.name.upper()})


NOTHING = Suppressions(frozenset(), {}, {})


def suppressions(script: Script, findings: Iterable[Finding]) -> Suppressions:
    """What the comments of ``script`` suppress of ``findings``; other tools' codes stand there too."""
    if not _may_speak_of(findings, script.text):
        return NOTHING
    comments, logical_lines = _tokenized(script)
    in_file: set[str] = set()
    by_line: dict[int, frozenset[str]] = {}
    for line, comment in comments:
        in_file |= _codes(re.search(IN_FILE, comment))
        codes = _codes(re.search(ON_LINE, comment))
        if codes:
            by_line[line] = codes
    return Suppressions(frozenset(in_file), by_line, logical_lines)


def _may_speak_of(findings: Iterable[Finding], text: str) -> bool:
    """Whether it is worth looking for the comments: taking a file apart takes as long as parsing it."""
    lower = text.lower()
    if "noqa" not in lower:
        return False
    named = any(key in lower for finding in findings for key in (finding.rule.code.lower(), finding.rule.name))
    return named or re.search(WITHOUT_CODES, text) is not None


def with_noqa(script: Script, findings: Iterable[Finding]) -> str:
    """The text of ``script`` with a comment for each of ``findings``, added to one that is there already."""
    _, logical_lines = _tokenized(script)
    wanted: dict[int, set[str]] = {}
    for finding in findings:
        line = script.line_of(finding.place)
        # At the end of the statement nothing can follow: neither a backslash nor the rest of a string.
        wanted.setdefault(logical_lines.get(line, (line, line))[1], set()).add(finding.rule.code)
    lines = list(script.lines)
    for line, codes in wanted.items():
        lines[line - 1] = _with_codes(lines[line - 1], sorted(codes))
    return "\n".join(lines)


def _with_codes(line: str, codes: Sequence[str]) -> str:
    present = next((match for match in reversed(list(re.finditer(ON_LINE, line))) if match["codes"]), None)
    if present:
        return f"{line[: present.end()]}, {', '.join(codes)}{line[present.end() :]}"
    return f"{line.rstrip()}  # noqa: {', '.join(codes)}"


def _codes(match: re.Match[str] | None) -> frozenset[str]:
    if match is None:
        return frozenset()
    if match["codes"]:
        return frozenset(re.split(r"[,\s]+", match["codes"].upper()))
    # "noqa: because" names nothing: a colon announces codes, so it does not mean all of them.
    return frozenset() if ":" in match[0].rpartition("noqa")[2] else EVERYTHING


def _tokenized(script: Script) -> tuple[list[tuple[int, str]], dict[int, tuple[int, int]]]:
    """The comments by line, and the logical lines that have several lines."""
    import io
    import tokenize

    comments: list[tuple[int, str]] = []
    logical_lines: dict[int, tuple[int, int]] = {}
    first: int | None = None
    passive = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}
    try:
        for token in tokenize.generate_tokens(io.StringIO(script.parsed).readline):
            if token.type == tokenize.COMMENT:
                comments.append((token.start[0], token.string))
            elif token.type == tokenize.NEWLINE:
                first, start = None, first or token.start[0]
                logical_lines.update(_lines_of(start, token.start[0]))
            elif first is None and token.type not in passive:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):  # ast read it, and tokenize stumbles: then a # starts a comment
        comments = [(number, line[line.index("#") :]) for number, line in enumerate(script.lines, 1) if "#" in line]
    return comments, logical_lines


def _lines_of(first: int, last: int) -> Iterator[tuple[int, tuple[int, int]]]:
    if last > first:
        yield from ((line, (first, last)) for line in range(first, last + 1))

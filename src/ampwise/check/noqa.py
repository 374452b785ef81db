"""Comments that suppress findings: ``# noqa``, ``# noqa: AMP101``, and ``# ampwise: noqa`` for a whole file.

A comment applies on the line of the finding, and on the first and last line of its statement. Names of rules work as
well as codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ampwise.check.source.script import SourceScript
from ampwise.finding import Finding

# As text, for `re` to compile at first use: most files have no such comment, and compiling takes milliseconds.
ITEM = r"(?:[A-Z]+[0-9]+|[A-Z0-9]+(?:-[A-Z0-9]+)+)\b"
CODES = rf"(?::\s*(?P<codes>{ITEM}(?:[,\s]+{ITEM})*)?|(?![\w:-]))"
ON_LINE = rf"(?i)#\s*noqa{CODES}"
IN_FILE = rf"(?i)#\s*ampwise:\s*noqa{CODES}"
EVERYTHING = frozenset({"*"})
WITHOUT_CODES = r"(?i)noqa(?!\s*:)"


@dataclass(frozen=True)
class Suppressions:
    """Codes and names, in capitals, that a file's comments suppress; EVERYTHING stands for all."""

    in_file: frozenset[str]
    by_line: dict[int, frozenset[str]]
    logical_lines: dict[int, tuple[int, int]]  # first and last line of the statement, for statements of several lines

    def cover(self, finding: Finding, line: int) -> bool:
        """Whether ``finding``, on ``line`` of the script's text, is suppressed."""
        lines = {line, *self.logical_lines.get(line, ())}
        suppressed = self.in_file.union(*(self.by_line.get(number, ()) for number in lines))
        return not suppressed.isdisjoint({"*", finding.rule.code, finding.rule.name.upper()})


def read_suppressions(script: SourceScript, findings: Iterable[Finding]) -> Suppressions:
    """Read what the comments of ``script`` suppress; skipped if they cannot concern ``findings``.

    Tokenizing a file is as slow as parsing it.
    """
    lower = script.text.lower()
    keys = [key for finding in findings for key in (finding.rule.code.lower(), finding.rule.name)]
    if "noqa" not in lower or not (any(key in lower for key in keys) or re.search(WITHOUT_CODES, script.text)):
        return Suppressions(frozenset(), {}, {})
    comments, logical_lines = _tokenized(script)
    in_file: set[str] = set()
    by_line: dict[int, frozenset[str]] = {}
    for line, comment in comments:
        in_file |= _codes(re.search(IN_FILE, comment))
        codes = _codes(re.search(ON_LINE, comment))
        if codes:
            by_line[line] = codes
    return Suppressions(frozenset(in_file), by_line, logical_lines)


def add_noqa_comments(script: SourceScript, findings: Iterable[Finding]) -> str:
    """Return the text of ``script`` with a comment for each of ``findings``, merged into existing ones."""
    _, logical_lines = _tokenized(script)
    wanted: dict[int, set[str]] = {}
    for finding in findings:
        line = script.line_of(finding.place)
        # At the end of a statement, a comment cannot end up before a backslash or inside a string.
        wanted.setdefault(logical_lines.get(line, (line, line))[1], set()).add(finding.rule.code)
    lines = list(script.lines)
    for number, codes in wanted.items():
        text, added = lines[number - 1], ", ".join(sorted(codes))
        present = [match.end() for match in re.finditer(ON_LINE, text) if match["codes"]]
        end = present[-1] if present else len(text)
        lines[number - 1] = f"{text[:end]}, {added}{text[end:]}" if present else f"{text.rstrip()}  # noqa: {added}"
    return "\n".join(lines)


def _codes(match: re.Match[str] | None) -> frozenset[str]:
    if match is None:
        return frozenset()
    if match["codes"]:
        return frozenset(re.split(r"[,\s]+", match["codes"].upper()))
    # "noqa: because" suppresses nothing: after a colon, codes are expected.
    return frozenset() if ":" in match[0].rpartition("noqa")[2] else EVERYTHING


def _tokenized(script: SourceScript) -> tuple[list[tuple[int, str]], dict[int, tuple[int, int]]]:
    """Return the comments with their lines, and the first and last lines of statements of several lines."""
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
                last, start = token.start[0], first or token.start[0]
                first = None
                if last > start:
                    logical_lines.update(dict.fromkeys(range(start, last + 1), (start, last)))
            elif first is None and token.type not in passive:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):  # ast could parse it, tokenize cannot: take every # for a comment
        comments = [(number, line[line.index("#") :]) for number, line in enumerate(script.lines, 1) if "#" in line]
    return comments, logical_lines

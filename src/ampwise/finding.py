"""Rule and Finding: the one thing every part of ampwise emits.

A rule says what is wrong in general, a finding says where it is wrong here. The linter, the runtime watch,
the hardware checks and the tracer all yield findings; the printers in ``ampwise.printers`` are their readers.
"""
# ruff: noqa: RUF023 (the parts of a record stand in the order they are shown in)

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from ampwise.frozen import Frozen

TYPE_CHECKING = False  # as in typing, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any, Literal

__all__ = ["Edit", "Finding", "Place", "Rule", "Severity", "edited"]


class Severity(StrEnum):
    """How much a finding matters, worst first."""

    ERROR = "error"  # training is corrupted
    WARNING = "warning"  # something is lost: speed, memory, state
    INFO = "info"  # advice

    @property
    def rank(self) -> int:
        """0 for the worst, so that sorting puts errors first."""
        return list(Severity).index(self)


class Place(Frozen):
    """Where something was found; every part is optional, because a gradient has no line and a line no step.

    >>> print(Place(file="train.py", line=12, column=5))
    train.py:12:5
    >>> print(Place(parameter="blocks.0.mlp.weight", step=400, rank=1))
    blocks.0.mlp.weight at step 400 on rank 1
    >>> print(Place(file="train.ipynb", cell=3, line=12, column=5))
    train.ipynb:cell 3:12:5

    Lines and columns count from 1, columns in characters (``ast`` counts from 0, in UTF-8 bytes), and
    ``end_column`` is the first column after the span: what editors, ruff and SARIF do. In a notebook ``cell``
    counts all cells from 1 and the lines count within the cell.
    """

    __slots__ = (
        "file",
        "line",
        "column",
        "end_line",
        "end_column",
        "module",
        "parameter",
        "device",
        "step",
        "rank",
        "cell",
    )

    def __init__(
        self,
        *,
        file: str | None = None,
        line: int | None = None,
        column: int | None = None,
        end_line: int | None = None,
        end_column: int | None = None,
        module: str | None = None,
        parameter: str | None = None,
        device: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        cell: int | None = None,
    ) -> None:
        self.file = file
        self.line = line
        self.column = column
        self.end_line = end_line
        self.end_column = end_column
        self.module = module
        self.parameter = parameter
        self.device = device
        self.step = step
        self.rank = rank
        self.cell = cell
        self._check()

    def _check(self) -> None:
        for name in ("line", "column", "end_line", "end_column"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Place({name}={value}): lines and columns count from 1")
        if self.cell is not None and self.cell < 1:
            raise ValueError(f"Place(cell={self.cell}): the cells of a notebook count from 1")
        if self.cell is not None and self.file is None:
            raise ValueError("Place: a cell without a file is no place; give the notebook too")
        if self.line is None and (self.column, self.end_line, self.end_column) != (None, None, None):
            raise ValueError("Place: a column or an end without a line is no place; give the line too")
        if (self.end_line is None) != (self.end_column is None):
            raise ValueError("Place: end_line and end_column come together")
        if self._end < self._start:
            raise ValueError(f"Place: the end {self._end} lies before the start {self._start}")

    @property
    def _start(self) -> tuple[int, int]:
        return (self.line or 1, self.column or 1)

    @property
    def _end(self) -> tuple[int, int]:
        return self._start if self.end_line is None else (self.end_line, self.end_column or 1)

    def __str__(self) -> str:
        cell = None if self.cell is None else f"cell {self.cell}"
        source = ":".join(str(part) for part in (self.file, cell, self.line, self.column) if part is not None)
        named = [part for part in (source, self.parameter or self.module, self.device) if part]
        text = " ".join(named) or ("" if self.step is not None or self.rank is not None else "(nowhere)")
        if self.step is not None:
            text += f" at step {self.step}"
        if self.rank is not None:
            text += f" on rank {self.rank}"
        return text.strip()

    def as_dict(self) -> dict[str, Any]:
        """The parts that are known, for JSON."""
        return {name: value for name, value in self.parts().items() if value is not None}


class Edit(Frozen):
    """One change to the text: what stands in a span gives way to ``content``.

    >>> Edit(line=4, column=1, end_line=4, end_column=1, content="scaler.update()\\n").is_insertion
    True

    Counted as in ``Place``: from 1, in characters, the end not included, within ``cell`` of a notebook.
    """

    __slots__ = ("line", "column", "end_line", "end_column", "content", "cell")

    def __init__(
        self, line: int, column: int, end_line: int, end_column: int, content: str, cell: int | None = None
    ) -> None:
        self.line = line
        self.column = column
        self.end_line = end_line
        self.end_column = end_column
        self.content = content
        self.cell = cell
        self._check()

    def _check(self) -> None:
        for name in ("line", "column", "end_line", "end_column", "cell"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Edit({name}={value}): lines, columns and cells count from 1")
        if self.end < self.start:
            raise ValueError(f"Edit: the end {self.end} lies before the start {self.start}")

    @property
    def start(self) -> tuple[int, int]:
        return (self.line, self.column)

    @property
    def end(self) -> tuple[int, int]:
        return (self.end_line, self.end_column)

    @property
    def is_insertion(self) -> bool:
        """Whether nothing is taken away."""
        return self.start == self.end

    def overlaps(self, other: Edit) -> bool:
        """Whether the two cannot both be made: edits that only touch, or insert at one spot, can."""
        return self.cell == other.cell and self.start < other.end and other.start < self.end

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the cell only where there is one."""
        return {name: value for name, value in self.parts().items() if value is not None}


def edited(text: str, edits: Iterable[Edit]) -> str:
    """``text`` after edits that all belong to it; what is inserted at one spot keeps the order given.

    >>> edited("loss.backward()\\n", [Edit(1, 1, 1, 5, "scaler.scale(loss)")])
    'scaler.scale(loss).backward()\\n'
    """
    ends = [end - 1 for end in itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    pieces, reached = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        start, stop = _offset(edit.start, ends), _offset(edit.end, ends)
        if start < reached:
            raise ValueError(f"the edit at {edit.line}:{edit.column} overlaps the one before it")
        pieces += [text[reached:start], edit.content]
        reached = stop
    return "".join([*pieces, text[reached:]])


def _offset(position: tuple[int, int], line_ends: Sequence[int]) -> int:
    line, column = position
    if line <= len(line_ends):
        offset = (line_ends[line - 2] + 1 if line > 1 else 0) + column - 1
        if offset <= line_ends[line - 1]:
            return offset
    raise ValueError(f"the edit at {line}:{column} lies outside the text")


class Rule(Frozen):
    """What is wrong in general, why it matters, and how to mend it.

    ``bad`` and ``good`` are short examples shown by ``ampwise explain`` and in the docs: Python, or commands
    when they start with ``$ ``. Codes that start with AMP are ampwise's own; a plugin brings its own letters.
    ``fixable`` says whether ``ampwise check --fix`` mends what the rule finds: "always", "sometimes", or "" for
    never.
    """

    __slots__ = ("code", "name", "severity", "summary", "why", "fix", "bad", "good", "on_by_default", "url", "fixable")

    def __init__(
        self,
        *,
        code: str,
        name: str,
        severity: Severity,
        summary: str,
        why: str,
        fix: str,
        bad: str,
        good: str,
        on_by_default: bool = True,
        url: str | None = None,
        fixable: Literal["", "sometimes", "always"] = "",
    ) -> None:
        self.code = code
        self.name = name
        self.severity = severity
        self.summary = summary
        self.why = why
        self.fix = fix
        self.bad = bad
        self.good = good
        self.on_by_default = on_by_default  # False: looked for only when selected
        self.url = url  # where more is written, for rules that have such a page
        self.fixable = fixable
        self._check()

    def _check(self) -> None:
        if not _is_code(self.code):
            raise ValueError(f"rule code {self.code!r} is not capital letters and three digits, as AMP101 is")
        if not _is_kebab_case(self.name):
            raise ValueError(f"rule {self.code}: name {self.name!r} is not kebab-case, as clip-scaled-grads is")
        if not isinstance(self.severity, Severity):
            raise ValueError(f"rule {self.code}: severity {self.severity!r} is not a Severity")
        for text in ("summary", "why", "fix", "bad", "good"):
            if not getattr(self, text).strip():
                raise ValueError(f"rule {self.code}: {text} is empty")
        if self.fixable not in ("", "sometimes", "always"):
            raise ValueError(f'rule {self.code}: fixable {self.fixable!r} is none of "always", "sometimes" and ""')

    @property
    def names_the_cause(self) -> bool:
        """Whether it is about an operation: what others say is not finite, this says where it comes from."""
        return self.code.startswith("AMP9")

    def at(
        self,
        place: Place,
        message: str,
        *,
        evidence: Mapping[str, Any] | None = None,
        fix: str | None = None,
        edits: Iterable[Edit] = (),
        safe: bool = True,
    ) -> Finding:
        """A finding of this rule; ``fix`` mends this very place; without it the rule's own advice holds.

        ``edits`` do to the text what ``fix`` says in words, ``safe`` unless they may change what else it does.
        """
        return Finding(
            rule=self,
            place=place,
            message=message,
            evidence=dict(evidence or {}),
            fix=fix or self.fix,
            edits=tuple(edits),
            safe=safe,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self.parts() | {"severity": str(self.severity)}


class Finding(Frozen):
    """A rule, a place, a message, the evidence, the fix, and the fix as edits where it can be made by machine.

    The edits belong together, all or none. They are ``safe`` when they keep the meaning of everything but the
    mistake; others are made only when asked for with ``--unsafe-fixes``.
    """

    __slots__ = ("rule", "place", "message", "evidence", "fix", "edits", "safe")

    def __init__(
        self,
        *,
        rule: Rule,
        place: Place,
        message: str,
        evidence: Mapping[str, Any] | None = None,
        fix: str,
        edits: tuple[Edit, ...] = (),
        safe: bool = True,
    ) -> None:
        self.rule = rule
        self.place = place
        self.message = message
        self.evidence: Mapping[str, Any] = {} if evidence is None else evidence
        self.fix = fix
        self.edits = edits
        self.safe = safe
        self._check()

    def _check(self) -> None:
        if self.edits and not self.rule.fixable:
            raise ValueError(f"rule {self.rule.code} is not fixable, and a finding of it has edits; say so in the rule")
        if self.edits and self.place.file is None:
            raise ValueError(f"rule {self.rule.code}: edits without a file to make them in")
        furthest: Edit | None = None  # of those that start before: if any reaches into the next, this one does
        for edit in sorted(self.edits, key=lambda edit: (edit.cell or 0, edit.start, edit.end)):
            if furthest is not None and furthest.overlaps(edit):
                raise ValueError(f"rule {self.rule.code}: the edits {furthest} and {edit} overlap")
            if furthest is None or furthest.cell != edit.cell or furthest.end < edit.end:
                furthest = edit

    def __repr__(self) -> str:
        # All of its parts are pages; as_dict() has them.
        return f"<Finding {self.rule.code} {self.rule.name} at {self.place}>"

    def __str__(self) -> str:
        from ampwise.printers.terminal import printable

        fix = "\n".join(f"    {printable(line)}" for line in self.fix.split("\n"))
        return f"{printable(f'{self.place}: {self.rule.code} {self.rule.name}: {self.message}')}\n{fix}"

    def __hash__(self) -> int:
        # The evidence is a dictionary, which has no hash.
        return hash((self.rule, self.place, self.message, self.fix, self.edits, self.safe))

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def shown_evidence(self) -> dict[str, Any]:
        """What of the evidence is for people; nested data is for machines."""
        return {key: value for key, value in self.evidence.items() if not isinstance(value, dict)}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON and records."""
        return {
            "code": self.rule.code,
            "name": self.rule.name,
            "severity": str(self.severity),
            "message": self.message,
            "place": self.place.as_dict(),
            "evidence": dict(self.evidence),
            "fix": self.fix,
            "edits": [edit.as_dict() for edit in self.edits],
            "safe": self.safe,
        }

    def _repr_html_(self) -> str:
        from ampwise.printers.html import finding_html

        return finding_html(self)


# Without regular expressions, since each start of the linter asks of every rule it loads.


def _is_code(text: str) -> bool:
    """Two to ten capital letters and three digits."""
    letters, digits = text[:-3], text[-3:]
    are_letters = letters.isalpha() and letters.isupper()
    return text.isascii() and 2 <= len(letters) <= 10 and are_letters and len(digits) == 3 and digits.isdigit()


def _is_kebab_case(text: str) -> bool:
    """Words of small letters and digits with a hyphen between them."""
    return text.isascii() and text == text.lower() and all(word.isalnum() for word in text.split("-"))

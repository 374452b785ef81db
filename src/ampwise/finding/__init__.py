"""Rule and Finding: what every part of ampwise reports.

A rule describes a mistake in general, a finding reports one instance of it. The linter, the runtime watch, the
hardware checks and the tracer all return findings; the printers in ``ampwise.report.printers`` show them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self

__all__ = ["Edit", "Finding", "Findings", "Place", "Rule", "Severity", "edited"]


class Severity(StrEnum):
    """How serious a finding is, worst first."""

    ERROR = "error"  # training is corrupted
    WARNING = "warning"  # something is lost: speed, memory, state
    INFO = "info"  # advice

    @property
    def rank(self) -> int:
        """Position in the order of severity: 0 for errors, so that they sort first."""
        return list(Severity).index(self)

    @property
    def word(self) -> str:
        """What people read: "note" for advice; the others as they are."""
        return "note" if self is Severity.INFO else str(self)


class _Record:
    """Base of the records below."""

    __slots__ = ()

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(_Record):
    """Where something was found. Every part is optional: a gradient has no line, and a line has no step.

    >>> print(Place(file="train.py", line=12, column=5))
    train.py:12:5
    >>> print(Place(parameter="blocks.0.mlp.weight", step=400, rank=1))
    blocks.0.mlp.weight at step 400 on rank 1
    >>> print(Place(file="train.ipynb", cell=3, line=12, column=5))
    train.ipynb:cell 3:12:5

    Lines and columns count from 1, columns in characters (``ast`` counts from 0, in UTF-8 bytes), and
    ``end_column`` is the first column after the span, as in editors, ruff and SARIF. In a notebook ``cell`` counts
    all cells from 1, and lines count within the cell.
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    module: str | None = None
    parameter: str | None = None
    device: str | None = None
    step: int | None = None
    rank: int | None = None
    cell: int | None = None

    def __post_init__(self) -> None:
        for name in ("line", "column", "end_line", "end_column"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Place({name}={value}): lines and columns count from 1")
        if self.cell is not None and self.cell < 1:
            raise ValueError(f"Place(cell={self.cell}): the cells of a notebook count from 1")
        if self.cell is not None and self.file is None:
            raise ValueError("Place: a cell needs a file; give the notebook too")
        if self.line is None and (self.column, self.end_line, self.end_column) != (None, None, None):
            raise ValueError("Place: a column or an end needs a line; give the line too")
        if (self.end_line is None) != (self.end_column is None):
            raise ValueError("Place: give both end_line and end_column, or neither")
        start, end = (self.line or 1, self.column or 1), (self.end_line, self.end_column)
        if end != (None, None) and end < start:
            raise ValueError(f"Place: the end {end} is before the start {start}")

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

    def __repr__(self) -> str:
        from ampwise.finding.terminal import shortened

        return shortened(f"Place({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})")

    def as_dict(self) -> dict[str, Any]:
        """Return the known parts as plain data for JSON."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Edit(_Record):
    """One change to the text: ``content`` replaces a span.

    >>> Edit(line=4, column=1, end_line=4, end_column=1, content="scaler.update()\\n").is_insertion
    True

    Positions count as in ``Place``: from 1, in characters, end exclusive, within ``cell`` of a notebook.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    content: str
    cell: int | None = None

    def __post_init__(self) -> None:
        for name in ("line", "column", "end_line", "end_column", "cell"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Edit({name}={value}): lines, columns and cells count from 1")
        if self.end < self.start:
            raise ValueError(f"Edit: the end {self.end} is before the start {self.start}")

    @property
    def start(self) -> tuple[int, int]:
        return (self.line, self.column)

    @property
    def end(self) -> tuple[int, int]:
        return (self.end_line, self.end_column)

    @property
    def is_insertion(self) -> bool:
        """Whether the edit removes nothing."""
        return self.start == self.end

    def overlaps(self, other: Edit) -> bool:
        """Return whether two edits conflict: edits that only touch, or insert at the same position, do not."""
        return self.cell == other.cell and self.start < other.end and other.start < self.end

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; the cell only if there is one."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return ``text`` with the edits applied; insertions at the same position keep their order.

    >>> edited("loss.backward()\\n", [Edit(1, 1, 1, 5, "scaler.scale(loss)")])
    'scaler.scale(loss).backward()\\n'
    """
    ends = [end - 1 for end in itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    pieces, reached = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        start, stop = _offset(edit.start, ends), _offset(edit.end, ends)
        if start < reached:
            raise ValueError(f"the edit at {edit.line}:{edit.column} overlaps the previous one")
        pieces += [text[reached:start], edit.content]
        reached = stop
    return "".join([*pieces, text[reached:]])


def _offset(position: tuple[int, int], line_ends: Sequence[int]) -> int:
    line, column = position
    if line <= len(line_ends):
        offset = (line_ends[line - 2] + 1 if line > 1 else 0) + column - 1
        if offset <= line_ends[line - 1]:
            return offset
    raise ValueError(f"the edit at {line}:{column} is outside the text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(_Record):
    """A kind of mistake: what it is, why it matters, and how to fix it.

    ``bad`` and ``good`` are short examples shown by ``ampwise explain`` and in the docs: Python, or commands
    if they start with ``$ ``. Codes that start with AMP are ampwise's own; a plugin uses its own letters.
    ``fixable`` says whether ``ampwise check --fix`` can fix its findings: "always", "sometimes", or "" for never.
    ``consequence_of`` lists rules, by code or the start of codes, whose faults have this one as a consequence: in a
    run with such a finding, one of this rule is shown as a part of it.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    fix: str
    bad: str
    good: str
    on_by_default: bool = True  # False: checked only when selected
    url: str | None = None  # page with more about the rule, if there is one
    fixable: Literal["", "sometimes", "always"] = ""
    consequence_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # No regular expressions: this runs for every rule at each start of the linter.
        letters, digits = self.code[:-3], self.code[-3:]
        is_code = letters.isalpha() and letters.isupper() and 2 <= len(letters) <= 10
        if not (self.code.isascii() and is_code and len(digits) == 3 and digits.isdigit()):
            raise ValueError(f"rule code {self.code!r}: expected capital letters and three digits, such as AMP101")
        words = self.name.split("-")
        if not (self.name.isascii() and self.name == self.name.lower() and all(map(str.isalnum, words))):
            raise ValueError(f"rule {self.code}: name {self.name!r}: expected kebab-case, such as clip-scaled-grads")
        if not isinstance(self.severity, Severity):
            raise ValueError(f"rule {self.code}: severity {self.severity!r} is not a Severity")
        for text in ("summary", "why", "fix", "bad", "good"):
            if not getattr(self, text).strip():
                raise ValueError(f"rule {self.code}: {text} is empty")
        if self.fixable not in ("", "sometimes", "always"):
            raise ValueError(f'rule {self.code}: fixable {self.fixable!r}: expected "always", "sometimes" or ""')

    def __repr__(self) -> str:
        return f"<Rule {self.code} {self.name}, {self.severity}>"

    @property
    def names_the_cause(self) -> bool:
        """Whether the rule names the operation that caused a NaN or infinity; other rules only report its effects."""
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
        """Return a finding of this rule; ``fix`` is the fix for this place, by default the rule's general advice.

        ``edits`` apply ``fix`` to the text; they are ``safe`` unless they may change other behaviour of the code.
        """
        fix, known, changes = fix or self.fix, dict(evidence or {}), tuple(edits)
        return Finding(rule=self, place=place, message=message, evidence=known, fix=fix, edits=changes, safe=safe)

    def without_edit(self, why: str, fix: str | None = None) -> str:
        """Return the advice for a place where a rule that has automatic fixes offers none, with the reason."""
        return f"{fix or self.fix} No automatic fix: {why}."

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"severity": str(self.severity), "consequence_of": list(self.consequence_of)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(_Record):
    """One instance of a rule: its place, message, evidence and fix, and edits if the fix can be applied automatically.

    The edits are applied all or none. They are ``safe`` if they change nothing but the mistake; unsafe ones are
    applied only with ``--unsafe-fixes``.
    """

    rule: Rule
    place: Place
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str
    edits: tuple[Edit, ...] = ()
    safe: bool = True

    def __post_init__(self) -> None:
        if self.edits and not self.rule.fixable:
            raise ValueError(f"rule {self.rule.code}: a finding has edits, but the rule is not fixable; set fixable")
        if self.edits and self.place.file is None:
            raise ValueError(f"rule {self.rule.code}: edits need a file; give the place a file")
        furthest: Edit | None = None  # the earlier edit with the latest end: if any overlaps the next, this one does
        for edit in sorted(self.edits, key=lambda edit: (edit.cell or 0, edit.start, edit.end)):
            if furthest is not None and furthest.overlaps(edit):
                raise ValueError(f"rule {self.rule.code}: the edits {furthest} and {edit} overlap")
            if furthest is None or furthest.cell != edit.cell or furthest.end < edit.end:
                furthest = edit

    def __repr__(self) -> str:
        # All of its parts would fill a page; as_dict() has them.
        from ampwise.finding.terminal import shortened

        return shortened(f"<Finding {self.rule.code} {self.rule.name} at {self.place}>")

    def __str__(self) -> str:
        from ampwise.finding.terminal import printable

        fix = "\n".join(f"    {printable(line)}" for line in self.fix.split("\n"))
        return f"{printable(f'{self.place}: {self.rule.code} {self.rule.name}: {self.message}')}\n{fix}"

    def __hash__(self) -> int:
        # Without the evidence, a dictionary, which is not hashable.
        return hash((self.rule, self.place, self.message, self.fix, self.edits, self.safe))

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def shown_evidence(self) -> dict[str, Any]:
        """The evidence to show to people: without nested data, which is for programs."""
        return {key: value for key, value in self.evidence.items() if not isinstance(value, dict)}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and records."""
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
        from ampwise.finding.html import finding_html

        return finding_html(self)


Findings = Iterator[Finding]  # what a check of a rule yields

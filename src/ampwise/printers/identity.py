"""What a finding is called by machines that remember: its path in the project, and its fingerprint."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

from ampwise.finding import Finding, Place

__all__ = ["fingerprints", "in_cell", "project_path"]


def project_path(file: str) -> str:
    """``file`` relative to the checkout, with forward slashes; absolute when it lies elsewhere.

    CI systems want paths from the root of the checkout, whatever folder the command ran in.
    """
    from pathlib import Path

    root = Path(os.environ.get("GITHUB_WORKSPACE") or os.environ.get("CI_PROJECT_DIR") or Path.cwd())
    # Not resolve(): a link inside the checkout is known to the CI system under its own name.
    path = Path(os.path.normpath(Path.cwd() / file))
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def in_cell(place: Place) -> str:
    """The spot within a notebook in words, for formats that know files of lines only.

    >>> in_cell(Place(file="train.ipynb", cell=3, line=12, column=5))
    'cell 3, line 12'
    """
    return f"cell {place.cell}" + ("" if place.line is None else f", line {place.line}")


def fingerprints(findings: Sequence[Finding]) -> list[str]:
    """One for each finding, in order: all different, and the same tomorrow when lines have only moved.

    So no line, column, step or rank goes in; findings alike in all else are told apart by their order.
    """
    seen: Counter[str] = Counter()
    prints = []
    for finding in findings:
        likeness = _likeness(finding)
        prints.append(_digest(f"{likeness}\0{seen[likeness]}"))
        seen[likeness] += 1
    return prints


def _likeness(finding: Finding) -> str:
    place = finding.place
    message = re.sub(r"\b(cell|line|step|rank)s? \d+", r"\1", finding.message)
    parts = (
        finding.rule.code,
        project_path(place.file) if place.file else "",
        place.module or "",
        place.parameter or "",
        place.device or "",
        message,
    )
    return "\0".join(parts)


def _digest(text: str) -> str:
    import hashlib  # loads OpenSSL

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]

"""Identify a finding for CI systems: its path in the project, and a fingerprint that is stable across runs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

from ampwise.finding import Finding, Place
from ampwise.report.printers.unread import NAME


def project_path(file: str) -> str:
    """Return ``file`` relative to the checkout, with forward slashes; absolute if it is outside.

    CI systems expect paths from the root of the checkout, whatever folder the command ran in.
    """
    from pathlib import Path

    root = Path(os.environ.get("GITHUB_WORKSPACE") or os.environ.get("CI_PROJECT_DIR") or Path.cwd())
    # Not resolve(): CI systems know a link inside the checkout by its own name.
    path = Path(os.path.normpath(Path.cwd() / file))
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def cell_position(place: Place) -> str:
    """Return the position within a notebook as text, for formats without cells.

    >>> cell_position(Place(file="train.ipynb", cell=3, line=12, column=5))
    'cell 3, line 12'
    """
    return f"cell {place.cell}" + ("" if place.line is None else f", line {place.line}")


def fingerprints(findings: Sequence[Finding]) -> list[str]:
    """Return a fingerprint for each finding, in order: all different, and stable when lines only move.

    They contain no line, column, step or rank; findings that are otherwise equal are distinguished by their order.
    """
    seen: Counter[str] = Counter()
    prints = []
    for finding in findings:
        place = finding.place
        path = project_path(place.file) if place.file else ""
        message = re.sub(r"\b(cell|line|step|rank)s? \d+", r"\1", finding.message)
        named = (place.module or "", place.parameter or "", place.device or "")
        identity = "\0".join((finding.rule.code, path, *named, message))
        prints.append(_digest(f"{identity}\0{seen[identity]}"))
        seen[identity] += 1
    return prints


def unread_fingerprint(file: str) -> str:
    """Return the fingerprint of a file that could not be checked: another reason is not another problem."""
    return _digest(f"{NAME}\0{project_path(file)}")


def _digest(text: str) -> str:
    import hashlib  # loads OpenSSL

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]

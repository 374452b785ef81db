"""What the linter finds in a script whose training the watch cannot see."""

from __future__ import annotations

import sys
from pathlib import Path

from ampwise.finding import Finding, Severity

__all__ = ["findings_in_script"]

LARGEST_BYTES = 300_000


def findings_in_script() -> list[Finding]:
    """Return the errors and warnings that ``ampwise check`` has for the file of ``__main__``."""
    from ampwise.check.linter import CheckTask, check_texts  # seldom needed
    from ampwise.finding.registry import source_rules

    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file() or Path(path).stat().st_size > LARGEST_BYTES:
        return []
    rules = [module.RULE for module in source_rules()]
    codes = frozenset(rule.code for rule in rules if rule.on_by_default and rule.severity is not Severity.INFO)
    return list(check_texts(CheckTask((path,), {path: codes})).findings)

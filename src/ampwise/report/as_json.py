"""A run for machines: one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.report.curves import plain, thinned
from ampwise.report.facts import environment, settings
from ampwise.report.layers import layers_of
from ampwise.report.verdict import verdict, worst_first
from ampwise.strict_json import dumps

if TYPE_CHECKING:
    from ampwise.record.reader import Run
    from ampwise.record.rows import Seen

__all__ = ["MOST_ROWS", "VERSION", "as_json"]

VERSION = 1
MOST_ROWS = 2000  # an optimizer; the record's own files have more


def as_json(run: Run) -> str:
    """Strict JSON: findings worst first, metrics, environment. Numbers that are not finite are strings."""
    return dumps(
        {
            "version": VERSION,
            "verdict": verdict(run),
            "status": run.status,
            "exit_code": run.manifest.get("exit_code"),
            "error": run.manifest.get("error"),
            "script": run.manifest.get("script"),
            "command": run.manifest.get("command"),
            "created": run.manifest.get("created"),
            "finished": run.manifest.get("finished"),
            "findings": [_finding(seen) for seen in worst_first(run.merged_findings())],
            "metrics": {
                "steps": [plain(bucket) for bucket in thinned(run.steps, MOST_ROWS)],
                "layers": [layer.as_dict() for layer in layers_of(run)],
            },
            "settings": [{"name": one.name, "value": one.value, "reason": one.reason} for one in settings(run)],
            "environment": environment(run),
            "trouble": list(run.trouble),
            "findings_known": run.findings_known,
            "facts": {name: fact for name, fact in run.facts.items() if name != "settings"},
        }
    )


def _finding(seen: Seen) -> dict[str, Any]:
    finding = seen.finding
    return {
        "code": finding.rule.code,
        "name": finding.rule.name,
        "severity": str(finding.severity),
        "place": finding.place.as_dict(),
        "message": finding.message,
        "count": seen.count,
        "fix": finding.fix,
        "evidence": dict(finding.evidence),
        "first_step": seen.first_step,
        "last_step": seen.last_step,
        "ranks": list(seen.ranks),
        "excerpt": seen.excerpt,
        "diff": seen.diff,
        "diff_is_safe": seen.diff_is_safe,
    }

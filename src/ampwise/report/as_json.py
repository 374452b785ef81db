"""A run as one JSON object."""

from __future__ import annotations

from ampwise.finding.strict_json import SCHEMA_VERSION, dumps
from ampwise.report.curves import thin_out
from ampwise.report.layers import layers_of
from ampwise.report.run_facts import environment, settings
from ampwise.report.verdict import verdict, worst_first
from ampwise.runs.reader import Run

MOST_ROWS = 2000  # per optimizer; the record's own files have more


def as_json(run: Run) -> str:
    """Return strict JSON: findings worst first, metrics, environment. Numbers that are not finite are strings."""
    return dumps(
        {
            "version": SCHEMA_VERSION,
            "verdict": verdict(run),
            "status": run.status,
            "exit_code": run.manifest.get("exit_code"),
            "error": run.manifest.get("error"),
            "script": run.manifest.get("script"),
            "command": run.manifest.get("command"),
            "created": run.manifest.get("created"),
            "finished": run.manifest.get("finished"),
            "findings": [counted.as_dict() for counted in worst_first(run.merged_findings())],
            "events": [event.as_dict() for event in run.events],
            "metrics": {
                "steps": [bucket.as_dict() for bucket in thin_out(run.steps, MOST_ROWS)],
                "layers": [layer.as_dict() for layer in layers_of(run)],
            },
            "settings": [{"name": one.name, "value": one.value, "reason": one.reason} for one in settings(run)],
            "environment": environment(run),
            "trouble": list(run.trouble),
            "findings_known": run.findings_known,
            "facts": {name: fact for name, fact in run.facts.items() if name != "settings"},
        }
    )

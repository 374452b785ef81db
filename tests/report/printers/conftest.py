"""Findings to print."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ampwise.finding import Edit, Finding, Place, Rule, Severity


def make_finding(
    message: str = "gradients are still scaled",
    *,
    code: str = "AMP101",
    name: str = "clip-scaled-grads",
    severity: Severity = Severity.ERROR,
    evidence: dict[str, Any] | None = None,
    fix: str | None = None,
    edits: Iterable[Edit] = (),
    safe: bool = True,
    **place: Any,
) -> Finding:
    rule = Rule(
        code=code,
        name=name,
        severity=severity,
        summary="Gradients are clipped while still scaled",
        why="The threshold is 65536 times too small.",
        fix="Call scaler.unscale_(optimizer) first.",
        bad="clip_grad_norm_(parameters, 1.0)",
        good="scaler.unscale_(optimizer)",
        fixable="sometimes",
    )
    return rule.at(Place(**place), message, evidence=evidence, fix=fix, edits=edits, safe=safe)


@pytest.fixture(scope="session")
def finding() -> Callable[..., Finding]:
    return make_finding


@pytest.fixture(scope="session")
def validate_sarif() -> Callable[[Any], None]:
    """Hold a log to the real schema of SARIF 2.1.0; see data/README.md."""
    import json

    import jsonschema  # not at load: the GPU machine has none

    schema = json.loads((Path(__file__).parent / "data" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema).validate


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in CI systems too, whose variables change where paths start and what is printed."""
    names = ("GITHUB_ACTIONS", "GITHUB_WORKSPACE", "CI_PROJECT_DIR", "AMPWISE_OUTPUT_FORMAT")
    for name in (*names, "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.guard.events import TrainingStopped

RULE = Rule(
    code="AMP807",
    name="training-stopped",
    severity=Severity.ERROR,
    summary="Training was stopped with exit code 70: no automatic recovery helped.",
    why=(
        "Every allowed recovery was tried, but the run is still bad. Continuing would waste time and eventually "
        "overwrite good checkpoints. The last saved weights are finite and healthy; nothing bad was saved."
    ),
    fix="Fix the cause, then start the same command again: it continues from the last good checkpoint.",
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
    consequence_of=("AMP9", "AMP607", "AMP612", "AMP613"),
)


def check_guard(stopped: TrainingStopped) -> Findings:
    yield RULE.at(Place(step=stopped.step), stopped.message, evidence=stopped.fields, fix=stopped.advice)

"""A run that the guard stopped."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.guard_event_text import event_evidence, one_line
from ampwise.rules.evidence.guard_events import TrainingStopped

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP807",
    name="training-stopped",
    severity=Severity.ERROR,
    summary="Training was stopped with exit code 70: no automatic recovery helped.",
    why=(
        "Steps were skipped and every other allowed recovery was tried, but the run is still bad. Continuing would "
        "waste time and eventually overwrite good checkpoints. The last saved weights are finite and healthy; nothing "
        "bad was saved."
    ),
    fix="Fix the cause, then start the same command again: it continues from the last good checkpoint.",
    bad="for x, y in loader:\n    engine.step(loss_fn, x, y)",
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)

EXIT_CODE = 70


def check(stopped: TrainingStopped) -> Iterator[Finding]:
    rungs = ", ".join(map(one_line, stopped.tried))
    tried = f"tried without success: {rungs}" if rungs else "nothing else is allowed"
    yield RULE.at(
        Place(step=stopped.step),
        f"training was stopped: {one_line(stopped.cause)}; {tried}",
        evidence=event_evidence(stopped) | {"exit_code": EXIT_CODE},
        fix=_next_steps(stopped),
    )


def _next_steps(stopped: TrainingStopped) -> str:
    look = f"Replay the bad step: {_replay(stopped)}. " if stopped.capsule else ""
    if stopped.checkpoint:
        from_where = f"it continues from {one_line(stopped.checkpoint)}"
    else:
        from_where = "it starts over, because there is no good checkpoint"
    return f"{look}Fix the cause, then start the same command again: {from_where}."


def _replay(stopped: TrainingStopped) -> str:
    """Return the replay command, with the function that builds the model."""
    command = f"ampwise replay {shlex.quote(stopped.capsule)} --build"
    if stopped.build:
        return f"`{command} {shlex.quote(stopped.build)}`"
    return f"`{command} train.py:make`, replacing train.py:make with your function that builds the model"

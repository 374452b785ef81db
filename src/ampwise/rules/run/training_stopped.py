"""A run that the guard has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ampwise.evidence.fault_words import evidence_of, one_line
from ampwise.evidence.faults import TrainingStopped
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP807",
    name="training-stopped",
    severity=Severity.ERROR,
    summary="Training was stopped, with exit code 70: nothing that may be done by itself has helped.",
    why=(
        "Steps were skipped, and whatever else is allowed was tried; the run is still bad. To go on would burn time "
        "and, in the end, good checkpoints. The weights that were saved last were finite and healthy; nothing bad "
        "was saved."
    ),
    fix="Mend the cause, then start the same command again: it goes on from the last good checkpoint.",
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
        evidence=evidence_of(stopped) | {"exit_code": EXIT_CODE},
        fix=_way_on(stopped),
    )


def _way_on(stopped: TrainingStopped) -> str:
    look = f"See the bad step again: {_replay(stopped)}. " if stopped.capsule else ""
    if stopped.checkpoint:
        from_where = f"it goes on from {one_line(stopped.checkpoint)}"
    else:
        from_where = "it begins anew, as there is no good checkpoint"
    return f"{look}Mend the cause, then start the same command again: {from_where}."


def _replay(stopped: TrainingStopped) -> str:
    """The command, which needs to be given what makes the model."""
    command = f"ampwise replay {shlex.quote(stopped.capsule)} --build"
    if stopped.build:
        return f"`{command} {shlex.quote(stopped.build)}`"
    return f"`{command} train.py:make`, with your own function that makes the model for train.py:make"

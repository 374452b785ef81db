from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.guard.events import CheckpointFailed

RULE = Rule(
    code="AMP808",
    name="checkpoint-failed",
    severity=Severity.ERROR,
    summary="A checkpoint could not be written; training continues, and the older checkpoints are kept.",
    why=(
        "If the run dies now, all steps since the last complete checkpoint are lost. Writing is retried when the next "
        "checkpoint is due; no old checkpoint is deleted before a new one is verified."
    ),
    fix="Fix the reported problem while the run continues; writing is retried when the next checkpoint is due.",
    bad='torch.save(model.state_dict(), "last.pt")  # over the only copy',
    good='with Guard(engine, "checkpoints"):\n    for x, y in loader:\n        engine.step(loss_fn, x, y)',
)


def check_guard(failed: CheckpointFailed) -> Findings:
    yield RULE.at(Place(step=failed.step), failed.message, evidence=failed.fields, fix=failed.advice)

"""A checkpoint to resume from, without the scaler."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.source.checkpoints import checkpoints_in, saves_scaler_alone
from ampwise.source.project import Code
from ampwise.source.scalers import works_with_scaler

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP204",
    name="scaler-not-checkpointed",
    severity=Severity.WARNING,
    summary="A checkpoint holds the optimizer's state and not the scaler's.",
    why=(
        "A resumed run starts again with a loss scale of 65536 and an empty growth count. The first steps after "
        "each resume overflow and are skipped until the scale is found again, and the run is no longer the one "
        "that would have gone on."
    ),
    fix="Save `scaler.state_dict()` with the optimizer's, and load it when resuming.",
    bad='torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)',
    good=(
        "state = {\n"
        '    "model": model.state_dict(),\n'
        '    "optimizer": optimizer.state_dict(),\n'
        '    "scaler": scaler.state_dict(),\n'
        "}\n"
        "torch.save(state, path)"
    ),
)
NEEDS = (("GradScaler", ".backward("), ("caler",), ("state_dict",))


def check(code: Code) -> Iterator[Finding]:
    if not works_with_scaler(code):
        return
    lacking = [one for one in checkpoints_in(code) if one.has_optimizer and one.is_whole and not one.has_scaler]
    if lacking and not saves_scaler_alone(code):
        for checkpoint in lacking:
            frame = checkpoint.context.frame if checkpoint.where is checkpoint.node else checkpoint.frame
            yield RULE.at(
                frame.outline.script.place(checkpoint.where),
                "this checkpoint has the optimizer's state and not the scaler's",
            )

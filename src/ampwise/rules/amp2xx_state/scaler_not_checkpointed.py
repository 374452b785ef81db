from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.checkpoints import saved_dicts, saves_scaler_alone
from ampwise.check.source.scalers import uses_scaler
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP204",
    name="scaler-not-checkpointed",
    severity=Severity.WARNING,
    summary="A checkpoint contains the optimizer's state but not the scaler's.",
    why=(
        "A resumed run starts again with a loss scale of 65536 and a growth counter of zero. The first steps after "
        "each resume overflow and are skipped until the scale is found again, and the run differs from an "
        "uninterrupted one."
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


def check_source(code: SourceFile) -> Findings:
    if not uses_scaler(code):
        return
    lacking = [each for each in saved_dicts(code) if each.has_optimizer and each.is_whole and not each.has_scaler]
    if lacking and not saves_scaler_alone(code):
        for checkpoint in lacking:
            frame = checkpoint.context.frame if checkpoint.where is checkpoint.node else checkpoint.frame
            yield RULE.at(
                frame.outline.script.place(checkpoint.where),
                "this checkpoint has the optimizer's state but not the scaler's",
            )


def check_run(run: RunEvents) -> Findings:
    stepped = [made for made in run.scalers if made.enabled]
    if not stepped or any(save.scaler for save in run.saves):
        return
    for save, times in run.saves.items():
        yield RULE.at(
            save.site.place,
            "the checkpoint has the optimizer's state, but not the GradScaler's",
            evidence={"times": times},
        )

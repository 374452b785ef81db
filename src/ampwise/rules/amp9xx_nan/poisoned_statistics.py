from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import bad_source_text, failure_finding

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP903",
    name="poisoned-statistics",
    severity=Severity.ERROR,
    summary="A buffer, such as BatchNorm's running statistics, was NaN or inf before the step began.",
    why=(
        "Running statistics are updated in the forward pass, so skipping the optimizer step does not undo that: one "
        "forward pass with inf or NaN leaves it in `running_mean` and `running_var` permanently, since each new value "
        "is averaged with the old. In training mode BatchNorm does not read them, so training may look fine while "
        "every evaluation is NaN."
    ),
    fix=(
        "Reset the statistics (`module.reset_running_stats()`), or restore them from an earlier checkpoint. Then find"
        " the batch that corrupted them: an earlier step was not finite."
    ),
    bad="model.train()\nmodel(batch_with_nan)  # the step is skipped, the statistics are not\nmodel.eval()\nmodel(x)",
    good="if x.isfinite().all():\n    loss = loss_fn(model(x), y)",
)

STATISTICS = ("running_mean", "running_var")


def check_op(failure: Failure) -> Findings:
    source = failure.source
    if failure.kind != RULE.name or source is None:
        return
    module, _, buffer = source.name.rpartition(".")
    if buffer not in STATISTICS:
        fix = "It is not a running statistic: check where it is created or loaded (a division by 0?), and rebuild it."
    else:
        fix = f"{RULE.fix}\n    model.get_submodule({module!r}).reset_running_stats()" if module else ""
    since = f"; {source.made_by} at {source.made_at.in_text}" if source.made_at.file else ""
    yield failure_finding(RULE, failure, f"the buffer {bad_source_text(source, since)}", advice=fix)

"""A buffer, such as BatchNorm's running mean, that was inf or NaN before the step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure
from ampwise.rules.evidence.failure_finding import failure_finding
from ampwise.rules.evidence.failure_text import bad_values_text, operation_text

__all__ = ["RULE", "check"]

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
        "Reset the statistics (`module.reset_running_stats()`) or restore the buffer from an earlier checkpoint, and "
        "find the batch that corrupted it: an earlier step was not finite."
    ),
    bad="model.train()\nmodel(batch_with_nan)  # the step is skipped, the statistics are not\nmodel.eval()\nmodel(x)",
    good="if x.isfinite().all():\n    loss = loss_fn(model(x), y)",
)

STATISTICS = ("running_mean", "running_var")


def check(incident: Failure) -> Iterator[Finding]:
    source = incident.source
    if incident.kind != RULE.name or source is None:
        return
    whose = f" ({source.module_class})" if source.module_class else ""
    first = f"; {operation_text(source.first_use)} was the first to read it" if source.first_use is not None else ""
    what = f"the buffer `{source.name}`{whose} had {bad_values_text(source.values)} before the step{first}"
    yield failure_finding(RULE, incident, what, advice=_advice(source.name))


def _advice(name: str) -> str:
    module, _, buffer = name.rpartition(".")
    if buffer not in STATISTICS:
        return "It is not a running statistic: check where it is created or loaded (a division by 0?), and rebuild it."
    if not module:
        return ""
    return f"{RULE.fix}\n    model.get_submodule({module!r}).reset_running_stats()"

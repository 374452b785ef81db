"""A buffer, such as BatchNorm's running mean, that was inf or NaN before the step."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Incident
from ampwise.evidence.incident_words import bad_values, operation
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP903",
    name="poisoned-statistics",
    severity=Severity.ERROR,
    summary="A buffer, such as BatchNorm's running statistics, was NaN or inf before the step began.",
    why=(
        "Running statistics change in the forward pass, so that skipping the optimizer's step does not undo it: one "
        "forward pass with inf or NaN and `running_mean` and `running_var` have it for good, since each new value is "
        "mixed with the old. In training mode a BatchNorm does not read them, so that training may look sound while "
        "every evaluation is NaN."
    ),
    fix=(
        "Reset the statistics (`module.reset_running_stats()`) or take the buffer from an earlier checkpoint, and "
        "find the batch that poisoned it: an earlier step was not finite."
    ),
    bad="model.train()\nmodel(batch_with_nan)  # the step is skipped, the statistics are not\nmodel.eval()\nmodel(x)",
    good="if x.isfinite().all():\n    loss = loss_fn(model(x), y)",
)

STATISTICS = ("running_mean", "running_var")


def check(incident: Incident) -> Iterator[Finding]:
    source = incident.source
    if incident.kind != RULE.name or source is None:
        return
    whose = f" ({source.module_class})" if source.module_class else ""
    first = f"; {operation(source.first_use)} read it first" if source.first_use is not None else ""
    what = f"the buffer `{source.name}`{whose} had {bad_values(source.values)} before the step{first}"
    yield told(RULE, incident, what, advice=_advice(source.name))


def _advice(name: str) -> str:
    module, _, buffer = name.rpartition(".")
    if buffer not in STATISTICS:
        return "It is no running statistic: look where it is made or loaded (a division by 0?), and build it again."
    if not module:
        return ""
    return f"{RULE.fix}\n    model.get_submodule({module!r}).reset_running_stats()"

"""A bad step whose replay is sound."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.incident import Incident
from ampwise.evidence.telling_incident import told
from ampwise.finding import Finding, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP915",
    name="not-reproduced",
    severity=Severity.WARNING,
    summary="The step was not finite, and replaying it gives finite numbers, or no operation to blame.",
    why=(
        "A replay has the same batch, weights, buffers and random numbers. If it is finite all the same, the step "
        "depends on something else: sums in an order that changes (atomic additions on a GPU), memory that nobody "
        "wrote to (`torch.empty`), a function that reads an iterator, a file or the clock, numbers of a compiled "
        "graph that eager code does not have, or a fault of the hardware."
    ),
    fix=(
        "Set `torch.use_deterministic_algorithms(True)` and look whether it comes again at the same step; run without "
        "torch.compile; if it is always the same machine, test its memory."
    ),
    bad="def loss_fn():\n    x, y = next(batches)  # another batch in the replay\n    return F.mse_loss(model(x), y)",
    good="def loss_fn(x, y):\n    return F.mse_loss(model(x), y)",
)


def check(incident: Incident) -> Iterator[Finding]:
    if incident.kind == RULE.name:
        yield told(RULE, incident, f"{_symptom(incident)}, and {_replay(incident)}")


def _symptom(incident: Incident) -> str:
    if incident.symptom == "gradients":
        return "gradients of this step were not finite"
    return f"the {incident.symptom} of this step was not finite"


def _replay(incident: Incident) -> str:
    if not incident.not_reproduced:
        return "the replay found no operation that made it so"
    return f"its replay is finite; tried: {incident.not_reproduced}"

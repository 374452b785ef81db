"""A bad step whose replay is finite."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Rule, Severity
from ampwise.rules.evidence.failure import Failure
from ampwise.rules.evidence.failure_finding import failure_finding

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP915",
    name="not-reproduced",
    severity=Severity.WARNING,
    summary="The step was not finite, but its replay is, or no responsible operation was found.",
    why=(
        "A replay uses the same batch, weights, buffers and random numbers. If it is finite, the step depends on "
        "something else: a nondeterministic summation order (atomic adds on a GPU), uninitialised memory "
        "(`torch.empty`), a function that reads an iterator, a file or the clock, numerics of a compiled graph that "
        "eager code does not have, or a hardware fault."
    ),
    fix=(
        "Set `torch.use_deterministic_algorithms(True)` and check whether it recurs at the same step; run without "
        "torch.compile; if it is always the same machine, test its memory."
    ),
    bad="def loss_fn():\n    x, y = next(batches)  # another batch in the replay\n    return F.mse_loss(model(x), y)",
    good="def loss_fn(x, y):\n    return F.mse_loss(model(x), y)",
)


def check(incident: Failure) -> Iterator[Finding]:
    if incident.kind == RULE.name:
        yield failure_finding(RULE, incident, f"{_symptom(incident)}, but {_replay(incident)}")


def _symptom(incident: Failure) -> str:
    if incident.symptom == "gradients":
        return "gradients of this step were not finite"
    return f"the {incident.symptom} of this step was not finite"


def _replay(incident: Failure) -> str:
    if not incident.not_reproduced:
        return "the replay found no operation that caused it"
    return f"its replay is finite; tried: {incident.not_reproduced}"

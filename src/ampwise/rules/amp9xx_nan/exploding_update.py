from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text
from ampwise.rules.amp9xx_nan.failure_text import bad_source_text, failure_finding, operation_text, value_text

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure
    from ampwise.trace.failure_facts import OptimizerFacts

RULE = Rule(
    code="AMP921",
    name="exploding-update",
    severity=Severity.ERROR,
    summary="The optimizer's updates made the weights grow until a result overflowed.",
    why=(
        "With a learning rate that is too high, each update overshoots by more than the one before: weights, loss and "
        "gradients grow by the same factor step after step, until something leaves the range. The operation that "
        "overflows first is not at fault, and no format or loss scale helps for long. A learning rate times weight "
        "decay above 2 does the same without any gradient."
    ),
    fix="Divide the learning rate by 10 until the norm of the weights stays steady, or warm it up; clip gradients.",
    bad="optimizer = torch.optim.SGD(model.parameters(), lr=50.0)",
    good="optimizer = torch.optim.SGD(model.parameters(), lr=0.05)",
)


def check_op(failure: Failure) -> Findings:
    facts, origin = failure.optimizer, failure.origin
    if failure.kind != RULE.name or facts is None or facts.first_norm is None or facts.norm is None:
        return
    steps = f"{facts.steps:,} step{'s' if facts.steps != 1 else ''}"
    norms = f"{number_text(facts.first_norm)} to {number_text(facts.norm)}"
    what = f"the weights' norm grew from {norms} in {steps} of {facts.name}{_settings(facts)}"
    if origin is not None:
        what += f"; then {operation_text(origin)} gives {value_text(origin.made)} at {origin.site.in_text}"
    elif failure.source is not None:
        what += f"; then {bad_source_text(failure.source)}"
    yield failure_finding(RULE, failure, what)


def _settings(facts: OptimizerFacts) -> str:
    parts = [] if facts.lr is None else [f"lr {number_text(facts.lr)}"]
    if facts.weight_decay:
        parts.append(f"weight decay {number_text(facts.weight_decay)}")
        if facts.lr is not None and facts.lr * facts.weight_decay > 2:
            parts.append(f"their product is {number_text(facts.lr * facts.weight_decay)}")
    return f" ({', '.join(parts)})" if parts else ""

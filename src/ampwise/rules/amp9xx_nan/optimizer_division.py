from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.numbers.number_text import number_text
from ampwise.rules.amp9xx_nan.failure_text import (
    bad_values_text,
    failure_finding,
    format_title,
    join_items,
    operation_text,
    value_text,
)

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP912",
    name="optimizer-division",
    severity=Severity.ERROR,
    summary="The optimizer's own arithmetic made the weights NaN or inf although the gradients were finite.",
    why=(
        "Adam and similar optimizers divide by sqrt(v) + eps, in the parameters' format. In FP16 the default eps of "
        "1e-8 is 0, and so is v, to which a thousandth of the squared gradient is added, for gradients below 5e-3: "
        "0/0 is NaN, and m/0 is inf. The gradients were fine, so no scaler skipped the step; the next loss is NaN."
    ),
    fix=(
        "Keep the parameters in FP32 and use autocast, as `ampwise.Engine` does. If they must be FP16, use an eps "
        "that FP16 can represent and that keeps updates small: 1e-4."
    ),
    bad="model.half()\noptimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
    good="optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\nengine = ampwise.Engine(model, optimizer)",
)

OF_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")
ABOVE_0 = "Use an eps above 0: for weights that have had no gradient yet, it is the whole divisor."


def check_op(failure: Failure) -> Findings:
    if failure.kind != RULE.name:
        return
    facts, source, origin = failure.optimizer, failure.source, failure.origin
    what, reasons, advice = "the optimizer" if facts is None else facts.name, [], ""
    if source is not None:
        what += f" left `{source.name}` with {bad_values_text(source.values)} although the gradients were finite"
    elif origin is not None:
        what += f": {operation_text(origin)} in its step gives {value_text(origin.made)}"
    if facts is not None and facts.eps_becomes == 0:
        eps = f" of {number_text(facts.eps)} is 0 in {format_title(facts.dtype)}" if facts.eps else " is 0"
        reasons.append(f"its eps{eps}")
        prefix = "torch.optim." if facts.name in OF_TORCH else ""
        call = f"optimizer = {prefix}{facts.name}(model.parameters(), eps={'1e-4' if facts.is_narrow else '1e-8'})"
        advice = f"{RULE.fix if facts.is_narrow else ABOVE_0}\n    {call}"
    if facts is not None and facts.zero_denominators:
        of = f" of {facts.bad_weights:,}" if facts.bad_weights > facts.zero_denominators else ""
        reasons.append(f"the second moment of {facts.zero_denominators:,}{of} bad weights is 0, so it divides by 0")
    yield failure_finding(RULE, failure, ": ".join([what, *filter(None, [join_items(reasons)])]), advice=advice)

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

RULE = Rule(
    code="AMP922",
    name="compiler-fault",
    severity=Severity.ERROR,
    summary="A step is not finite as torch.compile has compiled it, and finite with another backend or without.",
    why=(
        'The backends of torch.compile build on each other: "eager" runs the captured graph, "aot_eager" also what '
        'AOTAutograd makes of it, and "inductor" generates code for that. Here the same batch, weights and random '
        "numbers are finite in one of them and not in the next, so this next one is at fault, not the model. Generated "
        "code also rounds elsewhere: it keeps values in FP32 that eager code rounds to 16 bits."
    ),
    fix="Use a backend that changes less, or exclude the function with `@torch.compiler.disable`, and report it.",
    bad="model = torch.compile(model)  # NaN, and not in eager code",
    good='model = torch.compile(model, backend="aot_eager")',
)


def check_op(failure: Failure) -> Findings:
    if failure.kind != RULE.name:
        return
    (stage,) = [trial.argument for trial in failure.trials if trial.finite]
    are = "gradients of this step are" if failure.symptom == "gradients" else f"the {failure.symptom} of this step is"
    yield failure_finding(RULE, failure, f"{are} not finite as compiled, and finite in eager code: {stage} is at fault")

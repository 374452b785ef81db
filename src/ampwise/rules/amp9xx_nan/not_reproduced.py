from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Rule, Severity
from ampwise.rules.amp9xx_nan.failure_text import failure_finding

if TYPE_CHECKING:
    from ampwise.trace.failure import Failure

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
        "The loss function must give the same result when called again with the same arguments: pass what changes as "
        "an argument."
    ),
    bad="def loss_fn():\n    x, y = next(batches)  # another batch in the replay\n    return F.mse_loss(model(x), y)",
    good="def loss_fn(x, y):\n    return F.mse_loss(model(x), y)",
    consequence_of=("AMP612", "AMP613"),
)

ON_A_GPU = "Set `torch.use_deterministic_algorithms(True)`, and see whether it recurs at the same step."


def check_op(failure: Failure) -> Findings:
    if failure.kind == RULE.name:
        bad = (
            "gradients of this step were"
            if failure.symptom == "gradients"
            else f"the {failure.symptom} of this step was"
        )
        replay = "the replay found no operation that caused it"
        if failure.not_reproduced:
            replay = f"its replay is finite; tried: {failure.not_reproduced}"
        elsewhere = [
            (failure.device == "cuda", ON_A_GPU),
            (failure.compiled, "Run without torch.compile."),
            (failure.ranks > 1, "If it is always the same machine, test its memory."),
        ]
        advice = " ".join([RULE.fix, *(text for applies, text in elsewhere if applies)])
        yield failure_finding(RULE, failure, f"{bad} not finite, but {replay}", advice=advice)

"""Adam on FP16 parameters with an eps that FP16 rounds to zero."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampwise.check.source.half_models import half_optimizers
from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.torch_names import FP16
from ampwise.finding import Finding, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import Frame, SourceFile
    from ampwise.watch.run_events import OptimizerStep, ScalerStep

RULE = Rule(
    code="AMP305",
    name="adam-eps-half",
    severity=Severity.ERROR,
    summary="Adam runs on FP16 parameters with an eps that is zero in FP16.",
    why=(
        "Adam keeps its state in the dtype of the parameters. FP16 rounds everything up to 2**-25, about 3e-8, to "
        "zero: the default eps of 1e-8 vanishes, and so do the squares of gradients below 1.7e-4. If both are zero, "
        "the update divides by zero and the weight becomes inf or NaN."
    ),
    fix="Keep the parameters in FP32 and use autocast; if they must be FP16, use an eps of at least 1e-6.",
    bad="model.half()\noptimizer = torch.optim.Adam(model.parameters(), lr=1e-3)",
    good=(
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n"
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = model(x).sum()'
    ),
)
NEEDS = ((".half(", "float16", "torch.half"), ("Adam", "RMSprop"))

DIVIDING = frozenset(f"torch.optim.{name}" for name in ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop"))
DEFAULT_EPS = 1e-8
LARGEST_THAT_ROUNDS_TO_ZERO = 2.0**-25


def check_source(code: SourceFile) -> Iterator[Finding]:
    text = code.script.text
    if "optim" not in text or "backward(" not in text:
        return
    for pair in half_optimizers(code, FP16):
        eps = _eps(pair.optimizer, pair.frame) if pair.frame.qualified(pair.optimizer.func) in DIVIDING else None
        if eps is not None and eps <= LARGEST_THAT_ROUNDS_TO_ZERO:
            since = pair.model.spot(pair.place)
            yield RULE.at(pair.place, f"eps {eps:g} is zero in FP16, the dtype of the parameters since {since}")


def _eps(call: ast.Call, frame: Frame) -> float | None:
    """Return the eps in use; None when it is unknown, or when a fused kernel adds it in FP32."""
    if any(word.arg is None or word.arg == "fused" for word in call.keywords) or len(call.args) > 2:
        return None
    given = argument_of(call, "eps")
    if given is None:
        return DEFAULT_EPS
    values = frame.values(given)
    return literal_number(values[0].node) if len(values) == 1 else None


def check_event(step: OptimizerStep | ScalerStep) -> Iterator[Finding]:
    if step.half_parameters and step.eps is not None and step.eps <= LARGEST_THAT_ROUNDS_TO_ZERO:
        yield RULE.at(
            step.site.place,
            f"{step.optimizer} updates FP16 parameters with eps={step.eps:g}, which is 0 in FP16",
            evidence={"eps": step.eps},
        )

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.events import EventKind
from ampwise.check.source.half_models import half_optimizers
from ampwise.check.source.precision import argument_of, literal_number
from ampwise.check.source.torch_names import FP16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.types import SourceFile
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
    fix="Keep the parameters in FP32 and use autocast; if they must be FP16, use eps=1e-4.",
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


def check_source(code: SourceFile) -> Findings:
    text = code.script.text
    if "optim" not in text or "backward(" not in text:
        return
    scaled = [event for event in code.events if event.kind == EventKind.SCALER_STEP]
    for pair in half_optimizers(code, FP16):
        if any(pair.is_applied_by(step) for step in scaled):
            continue  # the scaler does not accept these parameters, which is AMP304's
        call, frame = pair.optimizer, pair.frame
        # A fused kernel adds eps in FP32; unpacked or further arguments may be anything.
        unknown = len(call.args) > 2 or any(word.arg is None or word.arg == "fused" for word in call.keywords)
        if unknown or frame.qualified(call.func) not in DIVIDING:
            continue
        given = argument_of(call, "eps")
        eps: float | None = DEFAULT_EPS
        if given is not None:
            values = frame.values(given)
            eps = literal_number(values[0].node) if len(values) == 1 else None
        if eps is not None and eps <= LARGEST_THAT_ROUNDS_TO_ZERO:
            since = pair.model.spot(pair.place)
            yield RULE.at(pair.place, f"eps {eps:g} is zero in FP16, the dtype of the parameters since {since}")


def check_event(step: OptimizerStep | ScalerStep) -> Findings:
    if step.half_parameters and step.eps is not None and step.eps <= LARGEST_THAT_ROUNDS_TO_ZERO:
        yield RULE.at(
            step.site.place,
            f"{step.optimizer} updates FP16 parameters with eps={step.eps:g}, which is 0 in FP16",
            evidence={"eps": step.eps},
        )

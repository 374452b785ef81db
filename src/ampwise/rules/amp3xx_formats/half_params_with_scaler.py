from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.check.source.cases import joined
from ampwise.check.source.half_models import trained_half_models
from ampwise.check.source.line_references import spot
from ampwise.check.source.modes import ON, UNSEEN, scalers_held
from ampwise.check.source.torch_names import FP16
from ampwise.finding import Findings, Rule, Severity

if TYPE_CHECKING:
    from ampwise.check.source.project import SourceFile
    from ampwise.watch.run_events import ScalerStep, Unscale

RULE = Rule(
    code="AMP304",
    name="half-params-with-scaler",
    severity=Severity.ERROR,
    summary="A model cast to FP16 is trained with a GradScaler.",
    why=(
        "A GradScaler needs FP32 parameters: for FP16 ones `unscale_`, and so `step`, raises `Attempting to unscale "
        "FP16 gradients`. FP16 weights also lose every update smaller than about 1/2048 of the weight. Under autocast "
        "the weights stay FP32 and are cast for each matmul."
    ),
    fix="Leave the model in FP32 and run its forward under `torch.autocast('cuda', dtype=torch.float16)`.",
    bad=(
        "model = Net().cuda().half()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scaler.scale(loss_fn(model(x), y)).backward()\nscaler.step(optimizer)"
    ),
    good=(
        "model = Net().cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        'with torch.autocast("cuda", dtype=torch.float16):\n    loss = loss_fn(model(x), y)\n'
        "scaler.scale(loss).backward()\nscaler.step(optimizer)"
    ),
)
NEEDS = (("caler",), (".half(", "float16", "torch.half"))


def check_source(code: SourceFile) -> Findings:
    steps = [event for event in code.events if event.kind == "scaler step"]
    reported = set()
    for pair in trained_half_models(code):
        if pair.model.dtype != FP16 or pair.model.node in reported:
            continue
        step = next((step for step in steps if pair.is_applied_by(step)), None)
        if step is None:
            continue
        scalers = scalers_held(step.frame, step.receiver)
        if any(made.state in (ON, UNSEEN) and joined(made.given, pair.model.given) is not None for made in scalers):
            reported.add(pair.model.node)
            place = pair.model.place
            line = spot(step.node, step.frame, place)
            yield RULE.at(place, f"the GradScaler that steps their optimizer in {line} does not accept FP16 parameters")


def check_event(event: ScalerStep | Unscale) -> Findings:
    if event.half_parameters:
        whose = f"parameters of {event.optimizer}" if hasattr(event, "optimizer") else "the parameters"
        yield RULE.at(event.site.place, f"{whose} are FP16: torch raises an error when unscaling their gradients")

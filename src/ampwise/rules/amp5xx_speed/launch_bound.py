from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import ratio_text

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP516",
    name="launch-bound",
    severity=Severity.INFO,
    summary="16-bit gains little, because the GPU spends much of a step waiting for the host.",
    why=(
        "Python launches operators one after the other. If the GPU finishes each before the host launches the next, "
        "the step takes as long as the host does. 16-bit makes the GPU's part even shorter, so it only waits longer."
    ),
    fix=(
        "Launch less: torch.compile, a CUDA graph (`ampwise.Engine(graph=True)`), a larger batch. And remove GPU "
        "syncs such as `.item()`."
    ),
    bad="loss = model(x)  # a thousand small operators",
    good='model = torch.compile(model, mode="reduce-overhead")\nloss = model(x)',
)

MUCH = 0.3  # of a step


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    if row is None or row.idle_share is None or row.idle_share < MUCH:
        return
    message = f"{row.label}: the GPU is idle for {row.idle_share:.0%} of a step"
    compiled = speeds.row(row.precision, compiled=True)
    if compiled is not None and compiled.ratio_to_eager is not None:
        message += f"; compiled, it is {ratio_text(compiled.ratio_to_eager.median)} as fast as eager fp32"
    evidence = {"idle_share": row.idle_share, "experiment": speeds.experiment("--compile")}
    yield RULE.at(Place(device=speeds.device_name), message, evidence=evidence)

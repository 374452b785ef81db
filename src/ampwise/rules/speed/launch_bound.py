"""A GPU that waits for the host."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.evidence.speed_words import times
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP516",
    name="launch-bound",
    severity=Severity.INFO,
    summary="16 bits gain little, and the GPU spends much of a step waiting for the host.",
    why=(
        "Python calls operators one after the other, and the GPU works them off. If it is done sooner than the host "
        "comes with the next, the step takes as long as the host does. 16 bits make the GPU's part shorter still, "
        "which only makes it wait longer."
    ),
    fix=(
        "Launch less: torch.compile, a CUDA graph (`ampwise.Engine(graph=True)`), a larger batch; and take out what "
        "waits for the GPU, such as `.item()`."
    ),
    bad="loss = model(x)  # a thousand small operators",
    good='model = torch.compile(model, mode="reduce-overhead")\nloss = model(x)',
)
MUCH = 0.3  # of a step


def check(speeds: Speeds) -> Iterator[Finding]:
    row = speeds.judged
    share = None if row is None else row.idle_share
    if row is None or share is None or share < MUCH:
        return
    compiled = speeds.row(row.precision, compiled=True)
    ratio = None if compiled is None else compiled.ratio_to_eager
    then = "" if ratio is None else f"; compiled, it is {times(ratio.median)} as fast as eager fp32"
    yield RULE.at(
        Place(device=speeds.device_name),
        f"{row.label}: the GPU has nothing to do for {share:.0%} of a step{then}",
        evidence={"idle_share": share, "experiment": speeds.experiment("--compile")},
    )

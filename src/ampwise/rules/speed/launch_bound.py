"""A GPU that is idle because the host launches kernels too slowly."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.speed import SpeedComparison
from ampwise.rules.evidence.speed_text import ratio_text

__all__ = ["RULE", "check"]

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
        "Launch less: torch.compile, a CUDA graph (`ampwise.Engine(graph=True)`), a larger batch; and remove GPU "
        "syncs such as `.item()`."
    ),
    bad="loss = model(x)  # a thousand small operators",
    good='model = torch.compile(model, mode="reduce-overhead")\nloss = model(x)',
)
MUCH = 0.3  # of a step


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    row = speeds.judged
    share = None if row is None else row.idle_share
    if row is None or share is None or share < MUCH:
        return
    compiled = speeds.row(row.precision, compiled=True)
    ratio = None if compiled is None else compiled.ratio_to_eager
    then = "" if ratio is None else f"; compiled, it is {ratio_text(ratio.median)} as fast as eager fp32"
    yield RULE.at(
        Place(device=speeds.device_name),
        f"{row.label}: the GPU is idle for {share:.0%} of a step{then}",
        evidence={"idle_share": share, "experiment": speeds.experiment("--compile")},
    )

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison
    from ampwise.watch.time_use import TimeUse

RULE = Rule(
    code="AMP505",
    name="casts-take-time",
    severity=Severity.INFO,
    summary="More than 15% of the device time goes into casts between precisions.",
    why=(
        "Autocast casts an operator's inputs each time, except weights, which it casts once per region. When FP32 and "
        "16-bit operators alternate, when a region is entered for each small piece, or when the cast cache is off, "
        "the casts cost what half precision saves."
    ),
    fix="Enter autocast once around the whole forward pass, keep its cache on, or let torch.compile fuse the casts.",
    bad=(
        "for block in blocks:\n"
        '    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):\n'
        "        x = block(x).float()"
    ),
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    for block in blocks:\n        x = block(x)',
)

MUCH = 0.15
LEAST = 5e-4  # seconds per step: less is negligible


def check_time(use: TimeUse) -> Findings:
    share, seconds = use.cast_share, use.time_by_kind.get("casts", 0.0) / max(use.profiled_steps, 1)
    if use.device == "cuda" and share is not None and share > MUCH and seconds > LEAST:
        message = f"{share:.0%} of the device time goes into casts: {1e3 * seconds:.1f} ms per step"
        yield RULE.at(Place(device=use.device), message, evidence={"share": share, "seconds_per_step": seconds})


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    if row is not None and row.split is not None and (share := row.split.share("casts")) > MUCH:
        message = f"{row.label}: {share:.0%} of the time goes into casts"
        evidence = {"share": share, "experiment": speeds.experiment("--compile")}
        yield RULE.at(Place(device=speeds.device_name), message, evidence=evidence)

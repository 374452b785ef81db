from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison
    from ampwise.watch.time_use import ProfiledMatmul, TimeUse

RULE = Rule(
    code="AMP504",
    name="little-work-in-half",
    severity=Severity.WARNING,
    summary="Autocast is on, but less than half of the matmul work runs in half precision.",
    why=(
        "The benefit of autocast is in the matmuls: in FP16 and BF16 they run many times faster than in FP32. It "
        "affects what is called inside its region, in the same thread. A model called outside it, a disabled region, "
        "custom operators and tensors cast with `.float()` before a matmul stay in FP32."
    ),
    fix="Put the model's whole forward pass and the loss inside autocast, and remove casts to FP32 before matmuls.",
    bad=(
        'features = backbone(x)\nwith torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "    loss = criterion(head(features), y)"
    ),
    good='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = criterion(head(backbone(x)), y)',
)

ENOUGH = 0.5
LEAST = 1e9  # FLOPs per step: with less work, no precision is faster
NAMED = 3


def check_time(use: TimeUse) -> Findings:
    share = use.half_share
    if use.device != "cuda" or use.autocast is None or share is None or share >= ENOUGH:
        return
    if use.flops >= LEAST * max(use.profiled_steps, 1):
        yield RULE.at(
            Place(device=use.device),
            f"autocast to {use.autocast.upper()} is on, but only {share:.0%} of the matmul work runs in half precision",
            evidence={
                "half_share": share,
                "exceptions": _exceptions(use.matmuls),
                "flops_by_precision": dict(use.flops_by_precision),
            },
        )


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    work = 0.0 if row is None else sum(product.flops for product in row.products)
    if row is None or not work:
        return
    share = 1 - sum(product.flops for product in row.products if not product.is_half) / work
    if share < ENOUGH:
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: {share:.0%} of the matmul work runs in 16-bit; the largest exceptions: "
            f"{_exceptions(row.products)}",
            evidence={"half_share": share, "experiment": speeds.experiment("--json | jq '.rows[].products'")},
        )


def _exceptions(products: Sequence[ProfiledMatmul]) -> str:
    wide = [f"{each.op} {each.shape} in {each.precision.upper()}" for each in products if not each.is_half]
    return ", ".join(wide[:NAMED])

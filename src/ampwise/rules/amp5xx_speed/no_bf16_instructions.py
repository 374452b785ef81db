from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import OPTIONAL, SpeedVerdict, ratio_text

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP519",
    name="no-bf16-instructions",
    severity=Severity.INFO,
    summary="BF16 is slow on a CPU that has no instructions for it.",
    why=(
        "BF16 matmuls are fast on CPUs with AMX tiles, AVX512-BF16 or ARM's BF16 extension. Other CPUs widen every "
        "value to FP32, compute, and round again, often in unoptimised kernels."
    ),
    fix="Stay with FP32 on this CPU, and measure BF16 on the device you will train on.",
    bad='with torch.autocast("cpu", torch.bfloat16):  # on a CPU without AMX\n    loss = model(x)',
    good="loss = model(x)",
)


def check_speed(speeds: SpeedComparison) -> Findings:
    for row in speeds.rows:
        if speeds.bf16_instructions is not False or row.precision != "bf16" or row.compiled or row.differs:
            continue
        if row.slower is not None:
            how = f"takes {row.slower:,.0f} times as long as fp32"
        elif row.ratio is None or row.ratio.median >= OPTIONAL or speeds.verdict(row) is SpeedVerdict.NOISE:
            continue
        else:
            how = f"is {ratio_text(row.ratio.median)} as fast as fp32"
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{speeds.device_name} has no instructions for BF16 (AMX, AVX512-BF16 or ARM's BF16); bf16 {how}",
            evidence={"experiment": "ampwise gpu"},
        )

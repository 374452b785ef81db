"""BF16 on a CPU without BF16 instructions."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.speed import PrecisionRow, SpeedComparison
from ampwise.rules.evidence.speed_text import ratio_text
from ampwise.rules.evidence.speed_verdict import OPTIONAL, SpeedVerdict

__all__ = ["RULE", "check"]

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


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    if speeds.bf16_instructions is not False:
        return
    for row in speeds.rows:
        how = _how_slow(row, speeds)
        if row.precision != "bf16" or row.compiled or row.differs or how is None:
            continue
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{speeds.device_name} has no instructions for BF16 (AMX, AVX512-BF16 or ARM's BF16); bf16 {how}",
            evidence={"experiment": "ampwise gpu"},
        )


def _how_slow(row: PrecisionRow, speeds: SpeedComparison) -> str | None:
    """Return how slow BF16 is; None if it is not slow, or the difference is within the noise."""
    if row.slower is not None:
        return f"takes {row.slower:,.0f} times as long as fp32"
    if row.ratio is None or row.ratio.median >= OPTIONAL or speeds.verdict(row) is SpeedVerdict.NOISE:
        return None
    return f"is {ratio_text(row.ratio.median)} as fast as fp32"

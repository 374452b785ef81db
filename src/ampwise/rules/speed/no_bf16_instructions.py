"""A CPU that computes BF16 without instructions for it."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Row, Speeds
from ampwise.evidence.speed_verdict import OPTIONAL, Verdict
from ampwise.evidence.speed_words import times
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP519",
    name="no-bf16-instructions",
    severity=Severity.INFO,
    summary="BF16 is slow on a CPU that has no instructions for it.",
    why=(
        "Products in BF16 are fast on CPUs with AMX tiles, AVX512-BF16 or ARM's BF16 extension. Others widen every "
        "value to FP32, compute, and round again, often in kernels that nobody has made fast."
    ),
    fix="Stay with FP32 on this CPU, and measure BF16 on the device that you will train on.",
    bad='with torch.autocast("cpu", torch.bfloat16):  # on a CPU without AMX\n    loss = model(x)',
    good="loss = model(x)",
)


def check(speeds: Speeds) -> Iterator[Finding]:
    if speeds.bf16_instructions is not False:
        return
    for row in speeds.rows:
        how = _how_slow(row, speeds)
        if row.precision != "bf16" or row.compiled or row.differs or how is None:
            continue
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{speeds.device_name} has no instructions for BF16 (AMX, AVX512-BF16 or ARM's BF16), and bf16 {how}",
            evidence={"experiment": "ampwise gpu"},
        )


def _how_slow(row: Row, speeds: Speeds) -> str | None:
    """None where it is not, or noise does not let one say so."""
    if row.slower is not None:
        return f"takes {row.slower:,.0f} times as long as fp32"
    if row.ratio is None or row.ratio.median >= OPTIONAL or speeds.verdict(row) is Verdict.NOISE:
        return None
    return f"is {times(row.ratio.median)} as fast as fp32"

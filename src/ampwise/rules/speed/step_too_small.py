"""A step whose pieces are over before the next one is launched."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import Speeds
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP515",
    name="step-too-small",
    severity=Severity.INFO,
    summary="16 bits gain little, and what is launched takes no longer than its launch.",
    why=(
        "To start an operator costs the host a few microseconds, whatever it computes and in whatever precision. Where "
        "the operators themselves take no longer, the time of a step is that of its launches, and faster matrix units "
        "have nothing to make faster."
    ),
    fix="Give each operator more to do: a larger batch, longer sequences, a wider model; or fuse them: torch.compile.",
    bad="loader = DataLoader(samples, batch_size=8)",
    good="loader = DataLoader(samples, batch_size=256)",
)
SHORT = 10e-6  # seconds: about what it takes to launch two


def check(speeds: Speeds) -> Iterator[Finding]:
    row = speeds.judged
    if row is None or row.split is None or not row.split.launches:
        return
    each = row.split.busy / row.split.launches
    if each < SHORT:
        what = "kernels" if row.split.on_device else "operators"
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: a step is {row.split.launches:,} {what} of {1e6 * each:.1f} µs each, no more than a launch "
            "takes",
            evidence={"launches": row.split.launches, "seconds_each": each, "experiment": speeds.larger()},
        )

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

RULE = Rule(
    code="AMP515",
    name="step-too-small",
    severity=Severity.INFO,
    summary="16-bit gains little, because the kernels take no longer than their launches.",
    why=(
        "Launching an operator takes the host a few microseconds, in any precision. If the operators themselves take "
        "no longer, the step time is the launch time, and faster tensor cores do not help."
    ),
    fix="Give each operator more work (a larger batch, longer sequences, a wider model), or fuse operators with "
    "torch.compile.",
    bad="loader = DataLoader(samples, batch_size=8)",
    good="loader = DataLoader(samples, batch_size=256)",
)
SHORT = 10e-6  # seconds: about two launches


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    if row is None or row.split is None or not row.split.launches:
        return
    each = row.split.busy / row.split.launches
    if each < SHORT:
        what = "kernels" if row.split.on_device else "operators"
        yield RULE.at(
            Place(device=speeds.device_name),
            f"{row.label}: a step is {row.split.launches:,} {what} of {1e6 * each:.1f} µs each, no longer than a "
            "launch",
            evidence={"launches": row.split.launches, "seconds_each": each, "experiment": speeds.larger()},
        )

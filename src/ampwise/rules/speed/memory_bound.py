"""A step that is limited by memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.finding import Finding, Place, Rule, Severity
from ampwise.rules.evidence.speed import NOT_MATRIX, PrecisionRow, SpeedComparison
from ampwise.rules.evidence.speed_text import KIND_WORDS

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP517",
    name="memory-bound",
    severity=Severity.INFO,
    summary="16-bit gains little, because most of the time is limited by memory, not by the tensor cores.",
    why=(
        "Tensor cores speed up matmuls and nothing else. Norms, activations and losses take as long as it takes to "
        "read and write their tensors, the optimizer's tensors stay in FP32, and a matmul with few rows reads its "
        "weights for very little computation."
    ),
    fix=(
        "Fuse elementwise operations with torch.compile, use a fused optimizer, and use a larger batch, so that each "
        "weight read serves more rows."
    ),
    bad="optimizer = AdamW(model.parameters(), foreach=False)\nloss = loss_fn(model(one_sample))",
    good="optimizer = AdamW(model.parameters(), fused=True)\nloss = loss_fn(torch.compile(model)(many_samples))",
)
MUCH = 0.5  # of the device's time
IDLE = 0.3  # of a step; above this the host is the limit
NAMED = 2


def check(speeds: SpeedComparison) -> Iterator[Finding]:
    row = speeds.judged
    if row is None or (row.idle_share or 0.0) >= IDLE:
        return
    message, evidence = _by_time(row) or _by_intensity(row, speeds) or ("", {})
    if message:
        by_optimizer = row.split is not None and row.split.share("optimizer") >= row.split.share("elementwise")
        shown = speeds.larger() if by_optimizer else speeds.experiment("--compile")
        yield RULE.at(Place(device=speeds.device_name), message, evidence={**evidence, "experiment": shown})


def _by_time(row: PrecisionRow) -> tuple[str, dict[str, float]] | None:
    if row.split is None or row.split.share(*NOT_MATRIX) < MUCH:
        return None
    largest = sorted(NOT_MATRIX, key=row.split.share, reverse=True)[:NAMED]
    named = " and ".join(f"{KIND_WORDS[kind]} ({row.split.share(kind):.0%})" for kind in largest)
    share = row.split.share(*NOT_MATRIX)
    return f"{row.label}: {share:.0%} of the time is limited by memory bandwidth, most of it {named}", {"share": share}


def _by_intensity(row: PrecisionRow, speeds: SpeedComparison) -> tuple[str, dict[str, float]] | None:
    if row.intensity is None or row.ridge is None or row.intensity >= row.ridge:
        return None
    message = (
        f"{row.label}: matmuls compute {row.intensity:.0f} FLOPs per byte that they move, but {speeds.device_name} "
        f"needs {row.ridge:.0f} to be compute-bound (by its datasheet)"
    )
    return message, {"intensity": row.intensity, "ridge": row.ridge}

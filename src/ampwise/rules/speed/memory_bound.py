"""A step that moves bytes rather than multiplies matrices."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.speed import NOT_MATRIX, Row, Speeds
from ampwise.evidence.speed_words import KIND_WORDS
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP517",
    name="memory-bound",
    severity=Severity.INFO,
    summary="16 bits gain little, and most of the time goes where memory is the limit, not the matrix units.",
    why=(
        "Matrix units make matrix products faster and nothing else. Norms, activations and losses take as long as "
        "their tensors take to be read and written, the optimizer's tensors stay in FP32, and a product of few rows "
        "reads its weights for nearly nothing."
    ),
    fix=(
        "Let torch.compile fuse what is elementwise, use a fused optimizer, and give each weight that is read more "
        "rows to be used for: a larger batch."
    ),
    bad="optimizer = AdamW(model.parameters(), foreach=False)\nloss = loss_fn(model(one_sample))",
    good="optimizer = AdamW(model.parameters(), fused=True)\nloss = loss_fn(torch.compile(model)(many_samples))",
)
MUCH = 0.5  # of the device's time
WAITS = 0.3  # of a step; beyond this it is the host that is the limit
NAMED = 2


def check(speeds: Speeds) -> Iterator[Finding]:
    row = speeds.judged
    if row is None or (row.idle_share or 0.0) >= WAITS:
        return
    message, evidence = _by_time(row) or _by_intensity(row, speeds) or ("", {})
    if message:
        by_optimizer = row.split is not None and row.split.share("optimizer") >= row.split.share("elementwise")
        shown = speeds.larger() if by_optimizer else speeds.experiment("--compile")
        yield RULE.at(Place(device=speeds.device_name), message, evidence={**evidence, "experiment": shown})


def _by_time(row: Row) -> tuple[str, dict[str, float]] | None:
    if row.split is None or row.split.share(*NOT_MATRIX) < MUCH:
        return None
    largest = sorted(NOT_MATRIX, key=row.split.share, reverse=True)[:NAMED]
    named = " and ".join(f"{KIND_WORDS[kind]} ({row.split.share(kind):.0%})" for kind in largest)
    share = row.split.share(*NOT_MATRIX)
    return f"{row.label}: {share:.0%} of the time goes into what moves bytes, most of it {named}", {"share": share}


def _by_intensity(row: Row, speeds: Speeds) -> tuple[str, dict[str, float]] | None:
    if row.intensity is None or row.ridge is None or row.intensity >= row.ridge:
        return None
    message = (
        f"{row.label}: matrix products compute {row.intensity:.0f} FLOPs for each byte that they move, and "
        f"{speeds.device_name} needs {row.ridge:.0f} to be busy (by its datasheet)"
    )
    return message, {"intensity": row.intensity, "ridge": row.ridge}

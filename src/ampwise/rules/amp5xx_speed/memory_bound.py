from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity
from ampwise.tune.bench.verdict import KIND_WORDS, MEMORY_BOUND

if TYPE_CHECKING:
    from ampwise.tune.bench.speeds import SpeedComparison

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
        "Fuse elementwise operations with torch.compile, and use a fused optimizer. A larger batch makes each weight "
        "that is read serve more rows."
    ),
    bad="optimizer = AdamW(model.parameters(), foreach=False)\nloss = loss_fn(model(one_sample))",
    good="optimizer = AdamW(model.parameters(), fused=True)\nloss = loss_fn(torch.compile(model)(many_samples))",
)

MUCH = 0.5  # of the device's time
IDLE = 0.3  # of a step; above this the host is the limit
NAMED = 2


def check_speed(speeds: SpeedComparison) -> Findings:
    row = speeds.judged
    if row is None or (row.idle_share or 0.0) >= IDLE:
        return
    split, evidence = row.split, dict[str, object]()
    if split is not None and (share := split.share(*MEMORY_BOUND)) >= MUCH:
        largest = sorted(MEMORY_BOUND, key=split.share, reverse=True)[:NAMED]
        named = " and ".join(f"{KIND_WORDS[kind]} ({split.share(kind):.0%})" for kind in largest)
        message = f"{share:.0%} of the time is limited by memory bandwidth, most of it {named}"
        evidence = {"share": share}
    elif row.intensity is not None and row.ridge is not None and row.intensity < row.ridge:
        message = (
            f"matmuls compute {row.intensity:.0f} FLOPs per byte that they move, but {speeds.device_name} needs "
            f"{row.ridge:.0f} to be compute-bound (by its datasheet)"
        )
        evidence = {"intensity": row.intensity, "ridge": row.ridge}
    else:
        return
    by_optimizer = split is not None and split.share("optimizer") >= split.share("elementwise")
    evidence["experiment"] = speeds.larger() if by_optimizer else speeds.experiment("--compile")
    yield RULE.at(Place(device=speeds.device_name), f"{row.label}: {message}", evidence=evidence)

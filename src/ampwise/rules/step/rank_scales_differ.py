"""Ranks that scale their losses differently."""

from __future__ import annotations

from collections.abc import Iterator

from ampwise.evidence.conduct import Conduct
from ampwise.finding import Finding, Place, Rule, Severity

__all__ = ["RULE", "check"]

RULE = Rule(
    code="AMP207",
    name="rank-scales-differ",
    severity=Severity.ERROR,
    summary="Ranks of one run multiply their losses by different scales.",
    why=(
        "Gradients are averaged over ranks as they are: those of a rank with half the scale count half. Scales that "
        "start equal stay equal, as all ranks see the same gradients; those that differ once, after a resume of one "
        "rank or a scaler with other settings, drift apart within some twenty steps."
    ),
    fix="Make the scaler with the same settings on every rank, and load its state on every rank.",
    bad='if rank == 0:\n    scaler.load_state_dict(checkpoint["scaler"])',
    good='scaler.load_state_dict(checkpoint["scaler"])  # on every rank',
)


def check(run: Conduct) -> Iterator[Finding]:
    first = run.scales_by_rank.get(0, {})
    for rank, scales in sorted(run.scales_by_rank.items()):
        step = next((step for step, scale in sorted(scales.items()) if first.get(step, scale) != scale), None)
        if step is not None:
            yield RULE.at(
                Place(step=step, rank=rank),
                f"the loss scale is {scales[step]:g} on rank {rank} and {first[step]:g} on rank 0",
                evidence={"scale": scales[step], "scale_on_rank_0": first[step]},
            )

from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.run_events import RunEvents

RULE = Rule(
    code="AMP207",
    name="rank-scales-differ",
    severity=Severity.ERROR,
    summary="The ranks of one run use different loss scales.",
    why=(
        "Gradients are averaged over ranks while scaled: those of a rank with half the scale count half. Scales that "
        "start equal stay equal, because all ranks see the same gradients; if they ever differ, after a resume of one "
        "rank or a scaler with other settings, they drift apart within about twenty steps."
    ),
    fix="Create the scaler with the same settings on every rank, and load its state on every rank.",
    bad='if rank == 0:\n    scaler.load_state_dict(checkpoint["scaler"])',
    good='scaler.load_state_dict(checkpoint["scaler"])  # on every rank',
)


def check_run(run: RunEvents) -> Findings:
    first = run.scales_by_rank.get(0, {})
    for rank, scales in sorted(run.scales_by_rank.items()):
        step = next((step for step, scale in sorted(scales.items()) if first.get(step, scale) != scale), None)
        if step is not None:
            yield RULE.at(
                Place(step=step, rank=rank),
                f"the loss scale is {scales[step]:g} on rank {rank} and {first[step]:g} on rank 0",
                evidence={"scale": scales[step], "scale_on_rank_0": first[step]},
            )

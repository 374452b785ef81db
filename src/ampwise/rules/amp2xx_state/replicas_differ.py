from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.run_events import ReplicaSum, RunEvents

RULE = Rule(
    code="AMP209",
    name="replicas-differ",
    severity=Severity.ERROR,
    summary="The ranks of one run train different weights, although they should be replicas of one model.",
    why=(
        "Data-parallel ranks stay equal because each starts from the same weights and applies the same averaged "
        "gradients. A forward pass of the module inside of the DistributedDataParallel wrapper, or one that never "
        "ends in its backward pass, averages nothing: each rank then trains a model of its own on its share of the "
        "data, and the checkpoint has that of one rank. Where gradients are averaged by hand, weights that were "
        "initialised from different seeds stay apart for ever. A clip by a norm that each rank computes from what it "
        "has itself scales shared gradients differently. None of these raises an error."
    ),
    fix=(
        "Call the wrapper, `model(x)`, and not `model.module(x)`. Without a wrapper, broadcast the weights once before "
        "training."
    ),
    bad="model = DistributedDataParallel(net)\nloss = model.module(x).mean()",
    good="model = DistributedDataParallel(net)\nloss = model(x).mean()",
)

ROUNDING = 1e-6  # relative


def check_run(run: RunEvents) -> Findings:
    first = {(each.optimizer, each.step): each for each in run.replicas.get(0, ())}
    found = set()
    for rank, sums in sorted(run.replicas.items()):
        equal: dict[int, int] = {}  # the last step with equal weights, by optimizer
        averaged: dict[int, int] = {}  # the same for gradients
        for here in sorted(sums, key=lambda each: each.step):
            zero = first.get((here.optimizer, here.step))
            if zero is None or here.optimizer in found:
                continue
            are_averaged = any(zero.gradients) and _are_equal(zero.gradients, here.gradients)
            if _are_equal(zero.weights, here.weights):
                equal[here.optimizer] = here.step
            elif why := _why(zero, here, are_averaged, equal.get(here.optimizer), averaged.get(here.optimizer)):
                found.add(here.optimizer)
                message = f"the weights of rank {rank} are not those of rank 0 at step {here.step}; {why[0]}"
                yield RULE.at(_place(here, rank), message, fix=why[1])
                continue
            if are_averaged:
                averaged[here.optimizer] = here.step
            factor, count = _common_factor(zero, here)
            if count >= 2:
                found.add(here.optimizer)
                yield RULE.at(
                    _place(here, rank),
                    f"{count} of {len(here.weights)} gradients that were compared are the same on ranks 0 and {rank} "
                    f"but for a factor of {factor:.4g} at step {here.step}: each rank clips or scales them by a number "
                    "of its own, and weights that were equal drift apart",
                    fix="Compute one norm for all ranks (sum its squares over them), and clip by that.",
                )


def _why(
    zero: ReplicaSum, here: ReplicaSum, are_averaged: bool, equal: int | None, averaged: int | None
) -> tuple[str, str] | None:
    """Return why weights that differ should not, and what to do; None for models of their own, and parts of one."""
    if are_averaged and equal is not None:
        return (
            f"at step {equal} they were, and the gradients are the same on both: in between, something changed the "
            "weights of one rank only, such as data that was lost on its way between the ranks",
            "Compare checksums of the gradients after each exchange. If the network or the driver loses data, try "
            "`NCCL_P2P_DISABLE=1`.",
        )
    if are_averaged:
        return (
            "their gradients are the same: they are averaged, and the weights were never equal",
            "Broadcast the weights once before training.",
        )
    if averaged is not None:
        return (
            f"their gradients were the same at step {averaged}, and now differ: not every backward pass averages them",
            "Wrap the model once, and call the wrapper in every training pass.",
        )
    if here.wrapped and zero.wrapped:
        return (
            "no backward pass has averaged their gradients, although DistributedDataParallel wraps the model",
            "Call the wrapper, `model(x)`, and not `model.module(x)`; move and convert the model before it is wrapped.",
        )
    return None


def _common_factor(zero: ReplicaSum, here: ReplicaSum) -> tuple[float, int]:
    """Return the factor by which most gradients of a rank differ from those of rank 0 as a whole, and how many do."""
    factors = []
    rows = zip(zero.gradients, here.gradients, zero.firsts, here.firsts, strict=False)
    for total, other, half, other_half in rows:
        # Two sums of each: a common factor of both is one of the whole, or a rare coincidence.
        if min(map(abs, (total, other, half, other_half, total - half))) > 0 and _are_close(
            other * half, other_half * total
        ):
            factors.append(other / total)
    alike = [each for each in factors if _are_close(each, factors[0]) and not _are_close(each, 1.0)]
    return (alike[0], len(alike)) if alike else (1.0, 0)


def _place(here: ReplicaSum, rank: int) -> Place:
    return Place(file=here.file or None, line=here.line if here.file else None, step=here.step, rank=rank)


def _are_close(first: float, second: float) -> bool:
    return abs(first - second) <= 10 * ROUNDING * max(abs(first), abs(second))


def _are_equal(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Return whether sums are equal but for their rounding; those of NaN count as equal, as they have other causes."""
    return len(first) == len(second) and not any(
        abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in zip(first, second, strict=True)
    )

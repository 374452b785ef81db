from __future__ import annotations

from typing import TYPE_CHECKING

from ampwise.finding import Findings, Place, Rule, Severity

if TYPE_CHECKING:
    from ampwise.watch.run_events import RunEvents

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
        "initialised from different seeds stay apart for ever. Neither raises an error."
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
        for here in sums:
            zero = first.get((here.optimizer, here.step))
            if zero is None or here.optimizer in found or _are_equal(zero.weights, here.weights):
                continue
            if here.wrapped and zero.wrapped:
                why = "no backward pass has averaged their gradients, although DistributedDataParallel wraps the model"
            elif any(zero.gradients) and _are_equal(zero.gradients, here.gradients):
                why = "their gradients are the same: they are averaged, and the weights were never equal"
            else:
                continue  # models of their own, or parts of one
            found.add(here.optimizer)
            place = Place(file=here.file or None, line=here.line if here.file else None, step=here.step, rank=rank)
            yield RULE.at(place, f"the weights of rank {rank} are not those of rank 0 at step {here.step}; {why}")


def _are_equal(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Return whether sums are equal but for their rounding; those of NaN count as equal, as they have other causes."""
    return len(first) == len(second) and not any(
        abs(a - b) > ROUNDING * max(abs(a), abs(b)) for a, b in zip(first, second, strict=True)
    )

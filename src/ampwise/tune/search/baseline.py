"""FP32, which all is compared with, and how far it is from itself: the noise floor."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.errors import BadInput
from ampwise.tune.search.difference import Groups, Reference, Tally
from ampwise.tune.search.passes import Batch, Outcome, Passes
from ampwise.tune.search.state import told_if_it_fails

__all__ = ["noise_of", "reference_of"]

NOT_REPEATABLE = 1e-3  # an error that no order of summation explains


def reference_of(passes: Passes, groups: Groups, batches: Sequence[Batch]) -> Reference:
    """Loss and gradients on each batch."""
    reference = Reference(groups, (_in_fp32(passes, batch) for batch in batches), len(batches))
    for what, size in (("the loss is", reference.loss_squares), ("all gradients are", float(reference.squares.sum()))):
        if batches and not size:
            raise BadInput(
                f"search(): {what} 0 in FP32, and an error is relative to it. Give batches that are not learned yet."
            )
    return reference


def noise_of(passes: Passes, reference: Reference, batches: Sequence[Batch], tolerance: float) -> float:
    """The error of FP32 against itself; a tolerance that is not above it is refused."""
    tally, again = Tally(reference), []
    for batch in batches:
        outcome = _in_fp32(passes, batch)
        again.append(outcome.loss)
        tally.add(outcome)
    noise = tally.difference.error
    if noise > NOT_REPEATABLE:
        first, second = max(zip(reference.losses, again, strict=True), key=lambda two: abs(two[0] - two[1]))
        raise BadInput(
            "search(): the function is not repeatable: run twice in FP32 on the same batch, from the same random "
            f"numbers, it gives a loss of {first:.6g} and then {second:.6g} (error {noise:.2g}). Does it change its "
            "arguments, count its calls, or have random numbers of its own?"
        )
    if noise >= tolerance:
        raise BadInput(
            f"search(tolerance={tolerance:g}): FP32 itself does not meet it between two runs: they differ by "
            f"{noise:.2g}, the noise floor here. Ask for {10 * noise:.0e} or more, or for "
            "torch.use_deterministic_algorithms(True)."
        )
    return noise


def _in_fp32(passes: Passes, batch: Batch) -> Outcome:
    with told_if_it_fails(f"batches[{batch.place}]"):
        outcome = passes.outcome(batch)
    if not outcome.finite:
        raise BadInput(
            f"search(): in FP32 the loss or a gradient is not finite on batches[{batch.place}], so there is nothing to "
            "compare with. ampwise.trace(fn, *batch) says where it comes from."
        )
    return outcome

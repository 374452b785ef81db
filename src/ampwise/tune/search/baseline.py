"""Run the FP32 reference, and measure how far two FP32 runs differ: the noise floor."""

from __future__ import annotations

from collections.abc import Sequence

from ampwise.errors import BadInput
from ampwise.tune.search.fp32_error import ErrorTally, Fp32Reference, ParameterGroups
from ampwise.tune.search.passes import PassResult, PassRunner, SearchBatch
from ampwise.tune.search.saved_state import errors_in_one_line

__all__ = ["measure_noise", "run_reference"]

NOT_REPEATABLE = 1e-3  # an error that no order of summation explains


def run_reference(passes: PassRunner, groups: ParameterGroups, batches: Sequence[SearchBatch]) -> Fp32Reference:
    """Compute FP32's loss and gradients on each batch."""
    reference = Fp32Reference(groups, (_in_fp32(passes, batch) for batch in batches), len(batches))
    for what, size in (("the loss is", reference.loss_squares), ("all gradients are", float(reference.squares.sum()))):
        if batches and not size:
            raise BadInput(
                f"search(): {what} 0 in FP32, so relative errors are undefined. Give batches that are not learned yet."
            )
    return reference


def measure_noise(
    passes: PassRunner, reference: Fp32Reference, batches: Sequence[SearchBatch], tolerance: float
) -> float:
    """Return the error between two FP32 runs; raise BadInput if the tolerance is not above it."""
    tally, again = ErrorTally(reference), []
    for batch in batches:
        outcome = _in_fp32(passes, batch)
        again.append(outcome.loss)
        tally.add(outcome)
    noise = tally.difference.error
    if noise > NOT_REPEATABLE:
        first, second = max(zip(reference.losses, again, strict=True), key=lambda two: abs(two[0] - two[1]))
        raise BadInput(
            "search(): the function is not repeatable: run twice in FP32 on the same batch, from the same random "
            f"numbers, its loss is {first:.6g} and then {second:.6g} (error {noise:.2g}). Does it change its "
            "arguments, count its calls, or use its own random generator?"
        )
    if noise >= tolerance:
        raise BadInput(
            f"search(tolerance={tolerance:g}): two FP32 runs already differ by {noise:.2g}, the noise floor here. Use "
            f"{10 * noise:.0e} or more, or call torch.use_deterministic_algorithms(True)."
        )
    return noise


def _in_fp32(passes: PassRunner, batch: SearchBatch) -> PassResult:
    with errors_in_one_line(f"batches[{batch.place}]"):
        outcome = passes.outcome(batch)
    if not outcome.finite:
        raise BadInput(
            f"search(): in FP32 the loss or a gradient is not finite on batches[{batch.place}], so there is nothing to "
            "compare with. ampwise.trace(fn, *batch) finds the origin."
        )
    return outcome

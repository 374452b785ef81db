"""How far loss and gradients are from FP32's, as one number.

Loss: the root of the summed squared differences over the batches, relative to that of the losses. Gradients: for each
module, half of the squared relative error of its gradient over the batches, which is the part of a step's progress
lost in it: 1 - cosine, where the lengths agree. The error is the largest of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from ampwise.errors import BadInput
from ampwise.tune.search.passes import PassResult, PassRunner, SearchBatch, errors_in_one_line

# A module whose gradient is smaller than this fraction of the typical, by root mean square, is treated as if it were
# that large: what should cancel to zero is exact in no format.
LEAST = 1e-3
NOT_REPEATABLE = 1e-3  # an error that no order of summation explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Error:
    """Difference of some passes from FP32's."""

    loss: float
    gradient: float  # of the worst module
    worst: str | None  # its name; None if there is no difference

    @property
    def error(self) -> float:
        """The number compared with the tolerance; infinite if something is not finite."""
        return max(self.loss, self.gradient)


class ParameterGroups:
    """Groups of parameters by the module that owns them."""

    def __init__(self, model: Module, parameters: Sequence[Tensor]) -> None:
        owners: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            owners.setdefault(id(parameter), name.rpartition(".")[0])
        self.names = list(dict.fromkeys(owners[id(parameter)] for parameter in parameters))
        places = {name: place for place, name in enumerate(self.names)}
        self.places = torch.tensor([places[owners[id(parameter)]] for parameter in parameters])
        sizes = torch.tensor([parameter.numel() for parameter in parameters], dtype=torch.float64)
        self.sizes = self.summed(sizes)

    def summed(self, by_parameter: Tensor) -> Tensor:
        """Sum numbers per parameter into one per group."""
        return torch.zeros(len(self.names), dtype=torch.float64).index_add_(0, self.places, by_parameter)


class Fp32Reference:
    """FP32's loss and gradients on each batch; gradients stay on the device if its memory allows."""

    def __init__(self, groups: ParameterGroups, outcomes: Iterable[PassResult], count: int) -> None:
        self.groups = groups
        self.losses: list[float] = []
        self.gradients: list[tuple[Tensor | None, ...]] = []
        squares = torch.zeros(len(groups.names), dtype=torch.float64)
        home: torch.device | None = None
        for outcome in outcomes:
            if home is None:  # the CPU, if the gradients would take more than a quarter of the GPU's free memory
                present = [each for each in outcome.gradients if each is not None]
                home = present[0].device if present else torch.device("cpu")
                taken = count * sum(each.nbytes for each in present)
                if home.type == "cuda" and 4 * taken > torch.cuda.mem_get_info(home)[0]:
                    home = torch.device("cpu")
            self.losses.append(outcome.loss)
            self.gradients.append(tuple(None if each is None else each.to(home) for each in outcome.gradients))
            squares += groups.summed(_squares(outcome.gradients))
        typical = squares.sum() / groups.sizes.sum()
        self.squares = torch.maximum(squares, LEAST**2 * typical * groups.sizes)
        self.loss_squares = math.fsum(loss * loss for loss in self.losses)


class ErrorTally:
    """Sums up differences batch by batch. They only grow: too large on one batch is too large on all."""

    def __init__(self, reference: Fp32Reference) -> None:
        self._reference = reference
        self._squares = torch.zeros(len(reference.groups.names), dtype=torch.float64)
        self._loss_squares = 0.0
        self.batches = 0

    def add(self, outcome: PassResult) -> None:
        """Add the next batch."""
        reference, place = self._reference, self.batches
        differences = []
        for own, other in zip(outcome.gradients, reference.gradients[place], strict=True):
            if own is None or other is None:  # as if it were zero: an expert that gets no rows has no gradient
                differences.append(other if own is None else own)
            else:
                differences.append(own - other.to(own.device))
        self._squares += reference.groups.summed(_squares(differences))
        self._loss_squares += (outcome.loss - reference.losses[place]) ** 2
        self.batches += 1

    @property
    def difference(self) -> Fp32Error:
        """The difference so far."""
        reference = self._reference
        shares = torch.where(self._squares > 0, self._squares / (2 * reference.squares), 0.0)
        shares = torch.where(self._squares.isfinite(), shares, math.inf)
        worst = int(shares.argmax())
        gradient = float(shares[worst])
        whole, squares = reference.loss_squares, self._loss_squares
        loss = math.sqrt(squares / whole) if whole else math.inf if squares else 0.0
        return Fp32Error(
            loss=loss if math.isfinite(squares) else math.inf,
            gradient=gradient,
            worst=reference.groups.names[worst] if gradient else None,
        )


def _squares(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each tensor, with one device sync for all."""
    present = [each for each in gradients if each is not None]
    norms = torch.zeros(len(gradients), dtype=torch.float64)
    if present:
        home = present[0].device
        dtype = torch.float32 if home.type == "mps" else torch.float64  # Apple's GPU has no FP64
        measured = torch.stack([torch.linalg.vector_norm(each, dtype=dtype).to(home) for each in present])
        norms[[place for place, each in enumerate(gradients) if each is not None]] = measured.cpu()
    return norms.square()


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
    if not (math.isfinite(outcome.loss) and outcome.finite_gradients):
        raise BadInput(
            f"search(): in FP32 the loss or a gradient is not finite on batches[{batch.place}], so there is nothing to "
            "compare with. ampwise.trace(fn, *batch) finds the origin."
        )
    return outcome

"""A model and how it is trained, alone or on several ranks; its steps run once each, on fake tensors.

The memory of each of several ranks is derived from the step of one. FSDP shards parameters, gradients and optimizer
state, and gathers weights block by block. DDP keeps everything on every rank, and adds buckets for the gradients.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.utils.checkpoint import checkpoint

from ampwise.errors import AmpwiseError, BadInput
from ampwise.trace.user_code import INSTALLED, OURS, describe_error
from ampwise.train.precision.precision import TrainPrecision
from ampwise.tune.memory.allocation_log import (
    BUCKETS,
    CASTS,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    PER_PARAMETER,
    REDUCED,
    WORKSPACES,
    AllocationLog,
)
from ampwise.tune.memory.allocator import Fit, RankStep
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.fake_tensors import KnownValues, real_values, without_memory
from ampwise.tune.memory.optimizers import make_optimizer
from ampwise.tune.memory.tracker import BACKWARD, FP8, track
from ampwise.tune.train_case import CaseFactory

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
DEFAULT_OPTIMIZER = "adamw"
FP32_BYTES = 4
MOST_RANKS = 1024
MOST_ROWS = 2**30
MOST_ROWS_RUN = 2**12  # if each size has to be simulated
# Blocks that FSDP holds in full, as measured: one that computes, and from the first gradient to the last three more,
# whose gradients are computed, copied and reduced.
GATHERED_BLOCKS, REDUCED_BLOCKS = 1, 3
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """Facts about a model, known once it is made."""

    parameters: int
    trained: int
    gradient_bytes: int
    rows: int | None  # rows of its batch
    optimizer: str
    convolutions: bool
    recurrent: bool
    block: int  # elements of the largest repeated block: FSDP gathers one at once
    outside: int  # elements in no block: gathered from first use to the end of the backward pass


class TrainingSetup:
    """A way of training whose memory can be computed for any precision and batch size."""

    def __init__(
        self,
        factory: CaseFactory,
        *,
        optimizer: str | None,
        checkpointing: bool = False,
        fsdp: int | None = None,
        ddp: bool = False,
        workspaces: int = 0,
        capability: tuple[int, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if fsdp is not None and fsdp < 1:
            raise BadInput(f"--fsdp {fsdp}: expected at least 1 rank.")
        self._factory, self._optimizer, self._checkpointing = factory, optimizer, checkpointing
        self._fsdp, self._ddp, self._workspaces = fsdp, ddp, workspaces
        self._capability = capability  # of the GPU; None: as on Hopper
        self._progress = progress or (lambda doing: None)
        self._runs: dict[tuple[object, int | None], tuple[AllocationLog, SetupFacts]] = {}

    def run(
        self, precision: TrainPrecision, batch: int | None, *, gathered: torch.dtype | None = None
    ) -> tuple[AllocationLog, SetupFacts]:
        """Return the log of a step on a single rank, with weights ``gathered`` in a dtype, and the model's facts."""
        form = (precision.dtype, precision.pure, gathered, precision.name == FP8, bool(precision.tf32))
        if (form, batch) not in self._runs:
            self._progress(f"{precision.name}{'' if batch is None else f', batch {batch}'}")
            found = self._tracked(precision, batch, gathered)
            self._runs[form, batch] = self._runs[form, found[1].rows] = found
            if not found[1].convolutions:  # TF32 is FP32 in memory, but for cuDNN's workspaces
                other = (*form[:-1], not form[-1])
                self._runs[other, batch] = self._runs[other, found[1].rows] = found
        return self._runs[form, batch]

    def step(self, precision: TrainPrecision, batch: int | None, *, fsdp: int | None = None) -> RankStep:
        """Return a step of one rank; ``fsdp``, a number of ranks, overrides the setup's."""
        return self._on_rank(self._log(precision, batch, fsdp or self._fsdp), precision, fsdp or self._fsdp)

    def fewest_ranks(self, precision: TrainPrecision, batch: int | None, available: int) -> int | None:
        """Return the fewest FSDP ranks, a power of two, on which a step fits the available bytes; None if none does."""
        ranks = 2
        while ranks <= MOST_RANKS:
            if self.step(precision, batch, fsdp=ranks).fit(available) is Fit.YES:
                return ranks
            ranks *= 2
        return None

    def largest_batch(self, precision: TrainPrecision, rows: int, available: int) -> int:
        """Return the largest batch with which a step fits the available bytes, to 1%, extrapolated from two sizes.

        The fit may be tight. The extrapolated size is then simulated; if it does not fit, or the steps of the two sizes
        differ, sizes are tried one by one.
        """

        def fits(size: int) -> bool:
            return self.step(precision, size).fit(available) is not Fit.NO

        if rows == 1 and self.step(precision, 1).lowest > available:
            return 0  # nor does any larger batch
        # With a single row, dimensions of one change which operations copy: two and three rows are more typical.
        sizes = (rows, 2 * rows) if rows > 1 else (2, 3)
        first, second = (self._log(precision, size, self._fsdp) for size in sizes)
        log_at = extrapolate(first, second, batches=sizes)
        if log_at is None:
            return largest_fitting(fits, MOST_ROWS_RUN, rows)

        def step_at(size: int) -> RankStep:
            return self._on_rank(log_at(size), precision, self._fsdp)

        top = largest_fitting(lambda size: step_at(size).lowest <= available, MOST_ROWS, rows)
        # A batch may pack better than a smaller one: search from above for the first that fits.
        below = range(top, 0, -max(1, top // 100))
        found = next((size for size in below if step_at(size).fit(available) is not Fit.NO), 0)
        return found if found == 0 or fits(found) else largest_fitting(fits, found - 1, found - 1)

    def _log(self, precision: TrainPrecision, batch: int | None, ranks: int | None) -> AllocationLog:
        """Return the log of a step, of which a rank has a part."""
        if ranks in (None, 1) or precision.dtype is None or precision.pure is not None or precision.name == FP8:
            return self.run(precision, batch)[0]
        # FSDP2 hands 16-bit weights to the model. What it shards stays FP32.
        log = self.run(precision, batch, gathered=precision.dtype)[0]
        return log.scaled(dict.fromkeys((PARAMETERS, GRADIENTS), FP32_BYTES / precision.dtype.itemsize))

    def _on_rank(self, log: AllocationLog, precision: TrainPrecision, ranks: int | None) -> RankStep:
        """Return one rank's part of a single-rank step."""
        facts = next(facts for _, facts in self._runs.values())
        extra = {WORKSPACES: self._workspaces if log.matmuls else 0}
        if self._ddp:  # copies of all gradients; with ``gradient_as_bucket_view=True`` there are none
            extra[BUCKETS] = facts.gradient_bytes
        if ranks is None or ranks == 1:
            return RankStep(log=log, extra=extra)
        element_bytes = FP32_BYTES if precision.dtype is None else precision.dtype.itemsize
        extra[GATHERED] = element_bytes * (facts.outside + GATHERED_BLOCKS * facts.block)
        return RankStep(log=fsdp_share(log, ranks, element_bytes * REDUCED_BLOCKS * facts.block), extra=extra)

    def _tracked(
        self, precision: TrainPrecision, batch: int | None, gathered: torch.dtype | None
    ) -> tuple[AllocationLog, SetupFacts]:
        name = self._factory.name
        with without_memory(), as_cuda(self._capability), _errors_in_one_line(name):
            with real_values():
                case = self._factory.make("cpu", batch)
            own = case.optimizer if self._optimizer is None else None
            optimizer = make_optimizer(self._optimizer or DEFAULT_OPTIMIZER, case.parameters) if own is None else own
            with KnownValues(), checkpointed(case.model, name) if self._checkpointing else nullcontext():
                log = track(case, precision, optimizer, gathered)
            model = case.model
            blocks = repeated_blocks(model)
            inside = {parameter for block in blocks for parameter in block.parameters()}
            return log, SetupFacts(
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                trained=sum(parameter.numel() for parameter in case.parameters),
                gradient_bytes=sum(parameter.nbytes for parameter in case.parameters),
                rows=case.rows,
                optimizer=self._optimizer or DEFAULT_OPTIMIZER if own is None else f"its own {type(own).__name__}",
                convolutions=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
                recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
                block=max((sum(each.numel() for each in block.parameters()) for block in blocks), default=0),
                outside=sum(each.numel() for each in model.parameters() if each not in inside),
            )


# --- other batch sizes and ranks ------------------------------------------------------------------------------------


def extrapolate(
    first: AllocationLog, second: AllocationLog, *, batches: tuple[int, int]
) -> Callable[[int], AllocationLog] | None:
    """Return the log at any batch size, from those at two: nearly every size is a constant plus bytes per row.

    None if the two steps do not consist of the same operations.
    """
    if (first.events, first.kinds) != (second.events, second.kinds):
        return None
    rows = batches[1] - batches[0]
    slopes = [(b - a) // rows for a, b in zip(first.sizes, second.sizes, strict=True)]

    def log_at(batch: int) -> AllocationLog:
        more = batch - batches[0]
        sizes = (max(0, size + slope * more) for size, slope in zip(first.sizes, slopes, strict=True))
        return replace(first, sizes=tuple(sizes))

    return log_at


def largest_fitting(fits: Callable[[int], bool], most: int, start: int = 1) -> int:
    """Return the largest number up to ``most`` that fits, if all smaller ones do; 0 if none does. ``start`` is a guess.

    >>> largest_fitting(lambda batch: batch <= 37, 1000)
    37
    """
    low, high = 0, most + 1  # the largest known to fit, and the smallest known not to
    size = min(start, most)
    while high - low > 1:
        low, high = (size, high) if fits(size) else (low, size)
        size = min(2 * low, most) if high > most else (low + high) // 2
    return low


def fsdp_share(log: AllocationLog, ranks: int, reduced: int) -> AllocationLog:
    """Return one rank's log, with the bytes for reduced gradients, and without gathered weights.

    These arrive in 16 bits: no casts, and no cache.
    """
    log = log.scaled({CASTS: 0, **dict.fromkeys(PER_PARAMETER, 1 / ranks)})
    backward = log.phase(BACKWARD)
    within = range(backward.start, backward.end)
    start = next((at for at in within if log.events[at] >= 0 and log.kinds[log.events[at]] == GRADIENTS), backward.end)
    block = len(log.sizes)
    events = (*log.events[:start], block, *log.events[start : backward.end], ~block, *log.events[backward.end :])

    def shifted(at: int) -> int:
        return at + 2 if at >= backward.end else at

    phases = tuple(replace(each, start=shifted(each.start), end=shifted(each.end)) for each in log.phases)
    return replace(log, sizes=(*log.sizes, reduced), kinds=(*log.kinds, REDUCED), events=events, phases=phases)


# --- repeated blocks, the units of activation checkpointing and of FSDP ---------------------------------------------


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a class that occurs more than once in a ``ModuleList`` or ``Sequential``."""
    found: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop(0)
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        kinds = Counter(type(child) for child in children)
        blocks = [child for child in children if kinds[type(child)] > 1 and next(child.children(), None) is not None]
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            blocks = []
        found += blocks
        pending += [child for child in children if child not in blocks]
    return found


@contextmanager
def checkpointed(model: nn.Module, name: str) -> Iterator[None]:
    """Checkpoint the repeated blocks while inside: each saves only its inputs, and recomputes the rest for backward."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise BadInput(
            f"{name}: checkpointing recomputes block by block, and no repeated blocks were found in this model: put "
            "them into a torch.nn.ModuleList or a torch.nn.Sequential."
        )
    own = {block: vars(block).get("forward") for block in blocks}
    for block in blocks:
        # The state of random numbers is not on the GPU, and fake tensors draw none.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for block, forward in own.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


# --- errors in the user's code --------------------------------------------------------------------------------------


@contextmanager
def _errors_in_one_line(name: str) -> Iterator[None]:
    """Turn errors in the user's code into one line with their location."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, READS_VALUES):
            cause = cause.__cause__
        if cause is None and isinstance(error, AmpwiseError):
            raise
        if cause is None:
            raise BadInput(f"{name}: a training step failed: {describe_error(error)}.") from error
        found = re.search(r"aten\.(\w+)", str(cause))
        operation = found[1] if found else type(cause).__name__
        operation = {"_local_scalar_dense": ".item()", "equal": "torch.equal"}.get(operation, operation)
        raise BadInput(
            f"{name}: the step reads the values of a tensor ({operation}){_place(cause)}, which has none "
            "while memory is computed: move .item(), nonzero() and conditions on values out of the step, or replace "
            "them by constants."
        ) from error


def _place(error: BaseException) -> str:
    """Return the last line in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not INSTALLED & set(Path(frame.filename).parts) and not frame.filename.startswith(str(OURS))
    ]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""

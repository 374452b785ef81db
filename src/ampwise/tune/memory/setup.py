"""A model and how it is trained; its steps run once each, on fake tensors."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.optim import Optimizer

from ampwise.errors import AmpwiseError, BadInput
from ampwise.finding.terminal import printable
from ampwise.trace.user_code import INSTALLED, OURS
from ampwise.train.precision.precision import TrainPrecision
from ampwise.tune.memory.allocation_log import AllocationLog
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.blocks import checkpointed
from ampwise.tune.memory.fake_tensors import without_memory
from ampwise.tune.memory.optimizers import make_optimizer
from ampwise.tune.memory.peak import WORKSPACES, Fit, Peak, check_fit, find_peak
from ampwise.tune.memory.ranks import Fsdp, FsdpUnits, ddp_buckets, fsdp_units
from ampwise.tune.memory.real_values import real_values
from ampwise.tune.memory.tracked_step import track
from ampwise.tune.train_case import CaseFactory, TrainCase

__all__ = ["Progress", "RankStep", "SetupFacts", "TrainingSetup"]

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
DEFAULT_OPTIMIZER = "adamw"
FP32_BYTES = 4
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """Facts about a model, known once it is made."""

    parameters: int
    trained: int
    rows: int | None  # rows of its batch
    optimizer: str
    convolutions: bool
    recurrent: bool
    units: FsdpUnits
    buckets: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A training step on one rank."""

    log: AllocationLog
    extra: Mapping[str, int]  # bytes that are always allocated

    @property
    def peak(self) -> Peak:
        return find_peak(self.log, self.extra)

    @property
    def lowest(self) -> int:
        """The peak without allocator overhead."""
        return self.log.peak(*self.log.phases) + sum(self.extra.values())

    def fit(self, available: int) -> Fit:
        return check_fit(self.log, self.extra, available)


class TrainingSetup:
    """A way of training whose memory can be computed for any precision and batch size."""

    def __init__(
        self,
        factory: CaseFactory,
        *,
        optimizer: str | None,
        checkpointing: bool = False,
        fsdp: Fsdp | None = None,
        ddp: bool = False,
        workspaces: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.factory, self.fsdp = factory, fsdp
        self._optimizer, self._checkpointing, self._ddp = optimizer, checkpointing, ddp
        self._workspaces = workspaces
        self._progress = progress or (lambda doing: None)
        self._runs: dict[tuple[object, int | None], tuple[AllocationLog, SetupFacts]] = {}

    def facts(self, precision: TrainPrecision, batch: int | None) -> SetupFacts:
        return self._run(precision, batch)[1]

    def step(self, precision: TrainPrecision, batch: int | None, *, fsdp: Fsdp | None = None) -> RankStep:
        """Return a step of one rank; ``fsdp`` overrides the case's."""
        return self.shared(self.whole(precision, batch), precision, fsdp)

    def whole(self, precision: TrainPrecision, batch: int | None) -> AllocationLog:
        """Return the log of a step on a single rank."""
        return self._run(precision, batch)[0]

    def shared(self, log: AllocationLog, precision: TrainPrecision, fsdp: Fsdp | None = None) -> RankStep:
        """Return one rank's part of a single-rank step."""
        extra = {WORKSPACES: self._workspaces}
        facts = next(facts for _, facts in self._runs.values())
        if self._ddp:
            extra |= facts.buckets
        fsdp = fsdp or self.fsdp
        if fsdp is None:
            return RankStep(log=log, extra=extra)
        element_bytes = FP32_BYTES if precision.dtype is None else precision.dtype.itemsize
        return RankStep(log=fsdp.share(log), extra=extra | fsdp.extra(facts.units, element_bytes))

    def _run(self, precision: TrainPrecision, batch: int | None) -> tuple[AllocationLog, SetupFacts]:
        form = (precision.dtype, precision.pure)  # TF32 is FP32 in memory
        key = (form, batch)
        if key not in self._runs:
            self._progress(f"{precision.name}{'' if batch is None else f', batch {batch}'}")
            found = self._tracked(precision, batch)
            self._runs[key] = self._runs[form, found[1].rows] = found
        return self._runs[key]

    def _tracked(self, precision: TrainPrecision, batch: int | None) -> tuple[AllocationLog, SetupFacts]:
        with without_memory(), as_cuda(), _errors_in_one_line(self.factory.name):
            with real_values():
                case = self.factory.make("cpu", batch)
            optimizer = self._optimizer_of(case)
            context = checkpointed(case.model, self.factory.name) if self._checkpointing else nullcontext()
            with context:
                log = track(case, precision, optimizer)
            return log, self._facts_of(case, optimizer)

    def _optimizer_of(self, case: TrainCase) -> Optimizer:
        if self._optimizer is None and case.optimizer is not None:
            return case.optimizer
        return make_optimizer(self._optimizer or DEFAULT_OPTIMIZER, case.parameters)

    def _facts_of(self, case: TrainCase, optimizer: Optimizer) -> SetupFacts:
        own = self._optimizer is None and case.optimizer is not None
        model = case.model
        return SetupFacts(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(parameter.numel() for parameter in case.parameters),
            rows=case.rows,
            optimizer=f"its own {type(optimizer).__name__}" if own else self._optimizer or DEFAULT_OPTIMIZER,
            convolutions=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
            units=fsdp_units(model),
            buckets=ddp_buckets(model),
        )


@contextmanager
def _errors_in_one_line(name: str) -> Iterator[None]:
    """Turn errors in the user's code into one line with their location."""
    try:
        yield
    except Exception as error:
        cause = _cause_reading_values(error)
        if cause is None and isinstance(error, AmpwiseError):
            raise
        if cause is None:
            raise BadInput(f"{name}: a training step failed: {_words(error)}{_place(error)}.") from error
        raise BadInput(
            f"{name}: the step reads the values of a tensor ({_operation(cause)}){_place(cause)}, which has none "
            "while memory is computed: move .item(), nonzero() and conditions on values out of the step, or replace "
            "them by constants."
        ) from error


def _cause_reading_values(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, READS_VALUES):
        error = error.__cause__
    return error


def _words(error: BaseException) -> str:
    text = printable(" ".join(str(error).split()))[:200].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _operation(error: BaseException) -> str:
    found = re.search(r"aten\.(\w+)", str(error))
    names = {"_local_scalar_dense": ".item()", "equal": "torch.equal"}
    return names.get(found[1], found[1]) if found else type(error).__name__


def _place(error: BaseException) -> str:
    """Return the last line in the user's own code."""
    ours = str(OURS)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not INSTALLED & set(Path(frame.filename).parts) and not frame.filename.startswith(ours)
    ]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""

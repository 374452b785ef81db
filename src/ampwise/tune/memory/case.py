"""What is asked about: a model and how it is trained. Its steps are run with fake tensors, each once."""

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

import ampwise
from ampwise.engine.precision.precision import Precision
from ampwise.errors import AmpwiseError, BadInput
from ampwise.printers.terminal import printable
from ampwise.tune.memory.as_cuda import as_cuda
from ampwise.tune.memory.blocks import checkpointed
from ampwise.tune.memory.fake import without_memory
from ampwise.tune.memory.log import Log
from ampwise.tune.memory.making import making
from ampwise.tune.memory.optimizers import make_optimizer
from ampwise.tune.memory.peak import WORKSPACES, Fit, Peak, fit, peak_of
from ampwise.tune.memory.ranks import Fsdp, Units, buckets, units_of
from ampwise.tune.memory.step import track
from ampwise.tune.subject import Maker, Subject
from ampwise.user_code import INSTALLED

__all__ = ["Case", "Facts", "Step", "Tell"]

ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
DEFAULT_OPTIMIZER = "adamw"
FP32_BYTES = 4
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model once it was made."""

    parameters: int
    trained: int
    rows: int | None  # of its batch
    optimizer: str
    convolutions: bool
    recurrent: bool
    units: Units
    buckets: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of one rank."""

    log: Log
    extra: Mapping[str, int]  # bytes that are always there

    @property
    def peak(self) -> Peak:
        return peak_of(self.log, self.extra)

    @property
    def lowest(self) -> int:
        """The peak, if no memory were lost between tensors."""
        return self.log.peak(*self.log.phases) + sum(self.extra.values())

    def fit(self, room: int) -> Fit:
        return fit(self.log, self.extra, room)


class Case:
    """A way of training, of which any precision and size of batch can be asked for."""

    def __init__(
        self,
        maker: Maker,
        *,
        optimizer: str | None,
        checkpointing: bool = False,
        fsdp: Fsdp | None = None,
        ddp: bool = False,
        workspaces: int = 0,
        tell: Tell | None = None,
    ) -> None:
        self.maker, self.fsdp = maker, fsdp
        self._optimizer, self._checkpointing, self._ddp = optimizer, checkpointing, ddp
        self._workspaces = workspaces
        self._tell = tell or (lambda doing: None)
        self._runs: dict[tuple[object, int | None], tuple[Log, Facts]] = {}

    def facts(self, precision: Precision, batch: int | None) -> Facts:
        return self._run(precision, batch)[1]

    def step(self, precision: Precision, batch: int | None, *, fsdp: Fsdp | None = None) -> Step:
        """A step as one rank has it; with ``fsdp``, among other ranks than the case's."""
        return self.shared(self.whole(precision, batch), precision, fsdp)

    def whole(self, precision: Precision, batch: int | None) -> Log:
        """A step, were there one rank."""
        return self._run(precision, batch)[0]

    def shared(self, log: Log, precision: Precision, fsdp: Fsdp | None = None) -> Step:
        """Of a step that was seen as a whole, what one rank has."""
        extra = {WORKSPACES: self._workspaces}
        facts = next(facts for _, facts in self._runs.values())
        if self._ddp:
            extra |= facts.buckets
        fsdp = fsdp or self.fsdp
        if fsdp is None:
            return Step(log=log, extra=extra)
        element_bytes = FP32_BYTES if precision.dtype is None else precision.dtype.itemsize
        return Step(log=fsdp.share(log), extra=extra | fsdp.extra(facts.units, element_bytes))

    def _run(self, precision: Precision, batch: int | None) -> tuple[Log, Facts]:
        form = (precision.dtype, precision.pure)  # TF32 is FP32 in memory
        key = (form, batch)
        if key not in self._runs:
            self._tell(f"{precision.name}{'' if batch is None else f', batch {batch}'}")
            found = self._tracked(precision, batch)
            self._runs[key] = self._runs[form, found[1].rows] = found
        return self._runs[key]

    def _tracked(self, precision: Precision, batch: int | None) -> tuple[Log, Facts]:
        with without_memory(), as_cuda(), _in_a_line(self.maker.name):
            with making():
                subject = self.maker.make("cpu", batch)
            optimizer = self._optimizer_of(subject)
            around = checkpointed(subject.model, self.maker.name) if self._checkpointing else nullcontext()
            with around:
                log = track(subject, precision, optimizer)
            return log, self._facts_of(subject, optimizer)

    def _optimizer_of(self, subject: Subject) -> Optimizer:
        if self._optimizer is None and subject.optimizer is not None:
            return subject.optimizer
        return make_optimizer(self._optimizer or DEFAULT_OPTIMIZER, subject.parameters)

    def _facts_of(self, subject: Subject, optimizer: Optimizer) -> Facts:
        own = self._optimizer is None and subject.optimizer is not None
        model = subject.model
        return Facts(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(parameter.numel() for parameter in subject.parameters),
            rows=subject.rows,
            optimizer=f"its own {type(optimizer).__name__}" if own else self._optimizer or DEFAULT_OPTIMIZER,
            convolutions=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
            recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
            units=units_of(model),
            buckets=buckets(model),
        )


@contextmanager
def _in_a_line(name: str) -> Iterator[None]:
    """What goes wrong in the user's code, as one line with its place."""
    try:
        yield
    except Exception as error:
        asks = _asked_for_values(error)
        if asks is None and isinstance(error, AmpwiseError):
            raise
        if asks is None:
            raise BadInput(f"{name}: a training step failed: {_words(error)}{_place(error)}.") from error
        raise BadInput(
            f"{name}: it asks for the values of a tensor ({_operation(asks)}){_place(asks)}, and while memory is "
            "counted tensors have none: take .item(), nonzero() and conditions on values out of the step, or put "
            "constants in their place."
        ) from error


def _asked_for_values(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, ASKS_FOR_VALUES):
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
    """The last line of the user's own."""
    ours = str(Path(ampwise.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not INSTALLED & set(Path(frame.filename).parts) and not frame.filename.startswith(ours)
    ]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""

"""Result of ``memory``: plain data, and its tables and sentences for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ampwise.finding.terminal import shortened
from ampwise.numbers.number_text import count_text
from ampwise.report.result_view import Headline, Line, Part, ResultTable, ShownResult
from ampwise.tune.memory.allocation_log import (
    ACTIVATIONS,
    BUCKETS,
    CASTS,
    COMPENSATION,
    CUDNN,
    GATHERED,
    INPUTS,
    PARAMETERS,
    PER_PARAMETER,
    REDUCED,
    STATE,
    TEMPORARY,
    WORKSPACES,
)
from ampwise.tune.memory.allocator import Fit, MemoryUsage
from ampwise.tune.memory.decoder import DecoderShape
from ampwise.tune.memory.device_memory import CONTEXT, GIB, MIB, DeviceMemory

KINDS = (
    *PER_PARAMETER,
    CASTS,
    ACTIVATIONS,
    INPUTS,
    GATHERED,
    REDUCED,
    BUCKETS,
    TEMPORARY,
    CUDNN,
    WORKSPACES,
)  # as shown
DERIVED, ALLOWANCE, MEASURED = "derived", "allowance", "measured"
LASTING = (PARAMETERS, STATE, COMPENSATION, INPUTS, WORKSPACES)  # kinds that stay from step to step
# Share of what a step adds to those that it needs in a compiled model: of seven models in BF16 and FP32 on an H200 with
# torch 2.11, 0.49 (GPT-2) to 1.00 (ConvNeXt).
COMPILED_LEAST = 0.45
CLOSE = 0.99  # of a peak that depends on cuDNN's workspaces by less than the rest, nothing is said
CAPTION = (
    "Each row is the maximum of its kind: the peak is below their sum, since activations are freed as gradients appear."
)
VERDICTS = {
    Fit.NO: "It does not fit",
    Fit.TIGHT: "It fits tightly: the allocator has to release and reallocate memory at every step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(MemoryUsage):
    """A step in one precision with one batch size; per rank, if there are several. In bytes."""

    precision: str
    batch: int | None
    fits: Fit | None  # whether it fits the GPU; None without a GPU
    ranks: int | None  # the fewest FSDP ranks on which it fits that GPU; None if it fits, or nothing helps
    smallest: DeviceMemory | None = None  # the smallest GPU memory in the catalog that suffices

    @property
    def per_parameter(self) -> int:
        """Bytes that do not depend on the batch: weights, gradients and optimizer state; of one rank."""
        return sum(self.most.get(kind, 0) for kind in PER_PARAMETER)

    @property
    def compiled_peak(self) -> tuple[int, int]:
        """The least and the most that the peak of a compiled model can be expected to be."""
        lasting = sum(self.most.get(kind, 0) for kind in LASTING)
        return lasting + round(COMPILED_LEAST * (self.least - lasting)), self.peak

    @property
    def needed(self) -> int:
        """Reserved bytes plus CUDA's context."""
        return self.reserved + CONTEXT

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "precision": self.precision,
            "batch": self.batch,
            "peak_bytes": self.peak,
            "peak_without_cudnn_bytes": self.least,
            "compiled_peak_bytes": list(self.compiled_peak),
            "reserved_bytes": self.reserved,
            "needed_bytes": self.needed,
            "phase": self.phase,
            "peak_split_bytes": dict(self.split),
            "most_bytes": dict(self.most),
            "phase_peak_bytes": dict(self.phases),
            "fits": None if self.fits is None else str(self.fits),
            "fsdp_ranks": self.ranks,
            "smallest_memory_bytes": None if self.smallest is None else self.smallest.total,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(ShownResult):
    """Result of ``ampwise.memory``."""

    name: str
    parameters: int
    trained: int
    shape: DecoderShape | None  # of a model given by its sizes
    optimizer: str
    checkpointing: bool
    fsdp: int | None
    ddp: bool
    compiled: bool = False
    gpu: DeviceMemory | None
    estimates: tuple[Estimate, ...]
    largest_batch: Mapping[str, int] | None = field(hash=False)  # by precision, on that GPU; 0 if not even one row fits
    notes: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(estimate.precision for estimate in self.estimates))

    @property
    def batches(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(estimate.batch for estimate in self.estimates))

    def at(self, precision: str, batch: int | None = None) -> Estimate:
        """Return the estimate of a precision; the first one unless a batch is given."""
        fitting = (each for each in self.estimates if each.precision == precision)
        return next(each for each in fitting if batch is None or each.batch == batch)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "shape": None if self.shape is None else asdict(self.shape),
            "optimizer": self.optimizer,
            "checkpointing": self.checkpointing,
            "fsdp": self.fsdp,
            "ddp": self.ddp,
            "compiled": self.compiled,
            "gpu": None if self.gpu is None else self.gpu.as_dict(),
            "context_bytes": CONTEXT,
            "estimates": [
                estimate.as_dict() | {"bytes_per_parameter": round(estimate.per_parameter / self.parameters, 4)}
                for estimate in self.estimates
            ],
            "largest_batch": None if self.largest_batch is None else dict(self.largest_batch),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return shortened(f"<MemoryEstimate of {headline(self)}>")

    def _parts(self) -> Iterator[Part]:
        """Yield the model, a table for each batch size, and what follows from them."""
        yield Headline(headline(self), mood="info")
        for batch in self.batches:
            shown = list(lines(self, batch))
            yield ResultTable(
                headings=(title(self, batch), *self.precisions, "basis"),
                rows=[(line.label, *line.cells, line.basis) for line in shown],
                left=(0, 1 + len(self.precisions)),
                styles=["bold" if line.strong else "" for line in shown],
            )
        yield from map(Line, verdicts(self))
        yield from (Line(note, "dim") for note in (CAPTION, *self.notes))


class MemoryLine(NamedTuple):
    """A row of the table: a cell for each precision."""

    label: str
    cells: tuple[str, ...]
    basis: str
    strong: bool = False


def headline(result: MemoryEstimate) -> str:
    """Describe the model and how it is trained."""
    how = [result.optimizer]
    if result.checkpointing:
        how.append("blocks recomputed")
    if result.fsdp is not None:
        how.append(f"a rank of {result.fsdp} with FSDP")
    if result.ddp:
        how.append("DDP")
    frozen = result.parameters - result.trained
    parameters = f"{count_text(result.parameters)} parameters" + (f", {count_text(frozen)} frozen" if frozen else "")
    return f"{result.name}: {parameters}; {', '.join(how)}"


def lines(result: MemoryEstimate, batch: int | None) -> Iterator[MemoryLine]:
    """Yield the rows of the table for one batch size."""
    columns = [result.at(precision, batch) for precision in result.precisions]
    _, unit = _unit(result)

    def shown(nbytes: int) -> str:
        digits = 2 if unit == GIB else 1
        least = 10**-digits
        if nbytes <= 0:
            return "-"
        return f"<{least}" if nbytes < least * unit else f"{nbytes / unit:.{digits}f}"

    def row(label: str, size: Callable[[Estimate], int], *, basis: str = DERIVED, strong: bool = False) -> MemoryLine:
        return MemoryLine(label, tuple(shown(size(column)) for column in columns), basis, strong)

    for kind in KINDS:
        if any(kind in column.most for column in columns):
            basis = MEASURED if kind == CUDNN else DERIVED
            yield row(kind, lambda column, kind=kind: column.most.get(kind, 0), basis=basis)  # type: ignore[misc]
    if result.fsdp is None:
        each = tuple(f"{column.per_parameter / result.parameters:.2f}" for column in columns)
        yield MemoryLine("bytes per parameter", each, DERIVED)
    yield row("peak", lambda column: column.peak, strong=True)
    if any(column.least < CLOSE * column.peak for column in columns):
        yield row("without cuDNN's", lambda column: column.least)
    if result.compiled:
        ends = ("–".join(map(shown, column.compiled_peak)) for column in columns)
        yield MemoryLine("compiled", tuple(ends), MEASURED)
    yield MemoryLine("peak in", tuple(column.phase for column in columns), "")
    yield row("reserved", lambda column: column.reserved)
    yield row("CUDA context", lambda _: CONTEXT, basis=ALLOWANCE)
    yield row("needed", lambda column: column.needed, strong=True)
    if result.gpu is not None:
        yield MemoryLine("fits", tuple(str(column.fits) for column in columns), result.gpu.basis, strong=True)
    else:
        sizes = (column.smallest and f"{column.smallest.total / GIB:.0f} GiB" for column in columns)
        yield MemoryLine("fits a GPU of", tuple(size or "none" for size in sizes), "datasheet", strong=True)


def _unit(result: MemoryEstimate) -> tuple[str, int]:
    """Return the unit for all numbers, and its bytes."""
    return ("GiB", GIB) if max(each.needed for each in result.estimates) >= 2 * GIB else ("MiB", MIB)


def title(result: MemoryEstimate, batch: int | None) -> str:
    """Return the title of a table: batch size and unit."""
    unit, _ = _unit(result)
    return unit if batch is None else f"batch {batch}, {unit}"


def verdicts(result: MemoryEstimate) -> Iterator[str]:
    """Yield what follows from the table, in sentences."""
    device = result.gpu
    if device is None:
        return
    yield (
        f"{device.name} has {device.total / GIB:.1f} GiB ({device.basis}), "
        f"of which torch can use {device.usable / GIB:.1f}."
    )
    for fit, verdict in VERDICTS.items():
        found = [
            each.precision if each.batch is None else f"{each.precision} with a batch of {each.batch}"
            for each in result.estimates
            if each.fits is fit
        ]
        if found:
            yield f"{verdict}: {', '.join(found)}."
    ranks = {each.precision: each.ranks for each in result.estimates if each.ranks is not None}
    if ranks:
        yield f"With FSDP it would fit on {', '.join(f'{count} ranks in {name}' for name, count in ranks.items())}."
    if result.largest_batch is not None:
        shown = ", ".join(f"{size or 'none'} in {name}" for name, size in result.largest_batch.items())
        yield f"The largest batch that fits: {shown}."

"""Format a memory estimate as rows of a table, for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ampwise.tune.memory.allocation_log import ACTIVATIONS, CASTS, INPUTS, PER_PARAMETER, TEMPORARY
from ampwise.tune.memory.decoder_shapes import count_text
from ampwise.tune.memory.device_memory import CONTEXT, GIB
from ampwise.tune.memory.peak import WORKSPACES, Fit
from ampwise.tune.memory.ranks import BUCKETS, GATHERED, REDUCED
from ampwise.tune.memory.result import Estimate, MemoryEstimate

__all__ = ["CAPTION", "MemoryLine", "as_text", "headline", "lines", "title", "verdicts"]

MIB = 2**20
DERIVED, ALLOWANCE = "derived", "allowance"
CAPTION = (
    "Each row is the maximum of its kind: the peak is below their sum, since activations are freed as gradients appear."
)
KINDS = (
    *PER_PARAMETER,
    CASTS,
    ACTIVATIONS,
    INPUTS,
    GATHERED,
    REDUCED,
    BUCKETS,
    TEMPORARY,
    WORKSPACES,
)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """A row of the table: a cell for each precision."""

    label: str
    cells: tuple[str, ...]
    basis: str
    strong: bool = False


def headline(result: MemoryEstimate) -> str:
    """Describe the model and how it is trained."""
    how = [f"{result.optimizer}"]
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
    unit = unit_of(result)
    for kind in KINDS:
        if any(kind in column.most for column in columns):
            yield _row(kind, columns, unit, lambda column, kind=kind: column.most.get(kind, 0))  # type: ignore[misc]
    if result.fsdp is None:
        each = tuple(f"{column.per_parameter / result.parameters:.2f}" for column in columns)
        yield MemoryLine("bytes per parameter", each, DERIVED)
    yield _row("peak", columns, unit, lambda column: column.peak, strong=True)
    yield MemoryLine("peak in", tuple(column.phase for column in columns), "")
    yield _row("reserved", columns, unit, lambda column: column.reserved)
    yield _row("CUDA context", columns, unit, lambda _: CONTEXT, basis=ALLOWANCE)
    yield _row("needed", columns, unit, lambda column: column.needed, strong=True)
    if result.gpu is not None:
        yield MemoryLine("fits", tuple(str(column.fits) for column in columns), result.gpu.basis, strong=True)
    else:
        yield MemoryLine("fits a GPU of", tuple(map(_smallest, columns)), "datasheet", strong=True)


def unit_of(result: MemoryEstimate) -> tuple[str, int]:
    """Return the unit for all numbers, and its bytes."""
    return ("GiB", GIB) if max(each.needed for each in result.estimates) >= 2 * GIB else ("MiB", MIB)


def verdicts(result: MemoryEstimate) -> Iterator[str]:
    """Yield what follows from the table, in sentences."""
    device = result.gpu
    if device is None:
        return
    yield (
        f"{device.name} has {device.total / GIB:.1f} GiB ({device.basis}), "
        f"of which torch can use {device.usable / GIB:.1f}."
    )
    for fit, parts in SAID.items():
        found = [each for each in result.estimates if each.fits is fit]
        if found:
            yield f"{parts}: {', '.join(map(_named, found))}."
    ranks = {each.precision: each.ranks for each in result.estimates if each.ranks is not None}
    if ranks:
        yield f"With FSDP it would fit on {', '.join(f'{count} ranks in {name}' for name, count in ranks.items())}."
    if result.largest_batch is not None:
        shown = ", ".join(f"{size or 'none'} in {name}" for name, size in result.largest_batch.items())
        yield f"The largest batch that fits: {shown}."


def as_text(result: MemoryEstimate) -> str:
    """Render the whole estimate as plain text."""
    parts = [headline(result)]
    for batch in result.batches:
        rows = [(title(result, batch), *result.precisions, "basis")]
        rows += [(line.label, *line.cells, line.basis) for line in lines(result, batch)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        parts.append("")
        for label, *cells, basis in rows:
            shown = (cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True))
            parts.append("  ".join((label.ljust(widths[0]), *shown, basis)).rstrip())
    return "\n".join([*parts, "", *verdicts(result), CAPTION, *result.notes])


def title(result: MemoryEstimate, batch: int | None) -> str:
    """Return the title of a table: batch size and unit."""
    unit, _ = unit_of(result)
    return unit if batch is None else f"batch {batch}, {unit}"


SAID = {
    Fit.NO: "It does not fit",
    Fit.TIGHT: "It fits tightly: the allocator has to release and reallocate memory at every step",
}


def _row(
    label: str,
    columns: list[Estimate],
    unit: tuple[str, int],
    size: Callable[[Estimate], int],
    *,
    basis: str = DERIVED,
    strong: bool = False,
) -> MemoryLine:
    return MemoryLine(label, tuple(_shown(size(column), unit[1]) for column in columns), basis, strong)


def _shown(nbytes: int, unit: int) -> str:
    if nbytes <= 0:
        return "-"
    digits = 2 if unit == GIB else 1
    least = 10**-digits
    return f"<{least}" if nbytes < least * unit else f"{nbytes / unit:.{digits}f}"


def _smallest(column: Estimate) -> str:
    return "none" if column.smallest is None else f"{column.smallest.total / GIB:.0f} GiB"


def _named(each: Estimate) -> str:
    return each.precision if each.batch is None else f"{each.precision} with a batch of {each.batch}"

"""The headline numbers of a run, for the top of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.report.curves import by_optimizer
from ampwise.report.formatting import format_duration, format_percent, format_scale, read_number
from ampwise.report.resource_usage import memory
from ampwise.report.run_facts import mapping, optimizer_names
from ampwise.report.verdict import skip_rate, steps_of

if TYPE_CHECKING:
    from ampwise.runs.bucket import NumberStats, StepBucket
    from ampwise.runs.reader import Run

__all__ = ["HeadlineNumber", "headline_numbers_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineNumber:
    """A headline number: name, formatted value, and an optional note."""

    name: str
    value: str
    note: str = ""


def headline_numbers_of(run: Run) -> list[HeadlineNumber]:
    """Return the numbers that are known. With several optimizers, loss and scale are those of the first."""
    return list(_numbers(run))


def _numbers(run: Run) -> Iterator[HeadlineNumber]:
    steps = steps_of(run)
    if not steps:
        return
    yield HeadlineNumber(name="steps", value=f"{steps:,}")
    skipped = sum(bucket.skipped for bucket in run.steps)
    yield HeadlineNumber(name="skipped", value=f"{skipped:,}", note=_share_skipped(run) if skipped else "")
    (optimizer, first), *others = by_optimizer(run.steps).items() or [(0, [])]
    owner = optimizer_names(run).get(optimizer, "") if others else ""
    yield from _of_line(first, owner)
    yield from _of_time(mapping(run, "timing"))
    held = memory(run)
    if held is not None and held.devices:
        yield HeadlineNumber(name="peak memory", value=held.devices[0].allocated, note=held.devices[0].name)
    elif held is not None and held.host_peak:
        yield HeadlineNumber(name="peak memory", value=held.host_peak, note="of the process")


def _of_line(line: list[StepBucket], owner: str) -> Iterator[HeadlineNumber]:
    losses = [bucket.loss for bucket in line if bucket.loss.known]
    if losses:
        ends = losses if len(losses) == 1 else (losses[0], losses[-1])
        yield HeadlineNumber(name="loss", value=" → ".join(map(_loss, ends)), note=owner)
    scales = [bucket.scale.mean for bucket in line if bucket.scale.mean is not None]
    if scales:
        yield HeadlineNumber(name="loss scale", value=format_scale(scales[-1]), note=owner)


def _share_skipped(run: Run) -> str:
    """Return the share of skipped steps, over all optimizers: together they may skip more steps than the run has."""
    several = len({bucket.optimizer for bucket in run.steps}) > 1
    return f"{format_percent(skip_rate(run.steps) or 0.0)}{' over all optimizers' if several else ''}"


def _loss(spread: NumberStats) -> str:
    """Return the mean; for merged steps of which most were not finite, "NaN" or "inf"."""
    if spread.mean is not None and spread.finite >= spread.bad:
        return f"{spread.mean:.4g}"
    return "NaN" if spread.nans else "inf" if spread.infs else "-inf"


def _of_time(timing: Mapping[str, object]) -> Iterator[HeadlineNumber]:
    seconds, half = read_number(timing.get("seconds_per_step")), read_number(timing.get("half_share"))
    if seconds is not None:
        yield HeadlineNumber(name="time per step", value=format_duration(seconds))
    if half is not None:
        yield HeadlineNumber(name="in half precision", value=format_percent(half), note="of matmul work")

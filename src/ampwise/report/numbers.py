"""The few numbers that say how a run went, for the top of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.report.curves import by_optimizer
from ampwise.report.facts import mapping, optimizer_names
from ampwise.report.usage import memory
from ampwise.report.verdict import skip_rate, steps_of
from ampwise.report.wording import duration, number, percent, scale_words

if TYPE_CHECKING:
    from ampwise.record.bucket import Bucket, Spread
    from ampwise.record.reader import Run

__all__ = ["Number", "numbers_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """What it is of, the number itself in words, and a word more."""

    name: str
    value: str
    note: str = ""


def numbers_of(run: Run) -> list[Number]:
    """Only those that are known. Of several optimizers the loss and the scale are those of the first."""
    return list(_numbers(run))


def _numbers(run: Run) -> Iterator[Number]:
    steps = steps_of(run)
    if not steps:
        return
    yield Number(name="steps", value=f"{steps:,}")
    skipped = sum(bucket.skipped for bucket in run.steps)
    yield Number(name="skipped", value=f"{skipped:,}", note=_share_skipped(run) if skipped else "")
    (optimizer, first), *others = by_optimizer(run.steps).items() or [(0, [])]
    owner = optimizer_names(run).get(optimizer, "") if others else ""
    yield from _of_line(first, owner)
    yield from _of_time(mapping(run, "timing"))
    held = memory(run)
    if held is not None and held.devices:
        yield Number(name="peak memory", value=held.devices[0].allocated, note=held.devices[0].name)
    elif held is not None and held.host_peak:
        yield Number(name="peak memory", value=held.host_peak, note="of the process")


def _of_line(line: list[Bucket], owner: str) -> Iterator[Number]:
    losses = [bucket.loss for bucket in line if bucket.loss.known]
    if losses:
        ends = losses if len(losses) == 1 else (losses[0], losses[-1])
        yield Number(name="loss", value=" → ".join(map(_loss, ends)), note=owner)
    scales = [bucket.scale.mean for bucket in line if bucket.scale.mean is not None]
    if scales:
        yield Number(name="loss scale", value=scale_words(scales[-1]), note=owner)


def _share_skipped(run: Run) -> str:
    """Of several optimizers, of the steps of all: more may be skipped than the run has steps."""
    several = len({bucket.optimizer for bucket in run.steps}) > 1
    return f"{percent(skip_rate(run.steps) or 0.0)}{' over all optimizers' if several else ''}"


def _loss(spread: Spread) -> str:
    """The mean; of merged steps of which most were not finite, that."""
    if spread.mean is not None and spread.finite >= spread.bad:
        return f"{spread.mean:.4g}"
    return "NaN" if spread.nans else "inf" if spread.infs else "-inf"


def _of_time(timing: Mapping[str, object]) -> Iterator[Number]:
    seconds, half = number(timing.get("seconds_per_step")), number(timing.get("half_share"))
    if seconds is not None:
        yield Number(name="time a step", value=duration(seconds))
    if half is not None:
        yield Number(name="in half precision", value=percent(half), note="of matrix work")
